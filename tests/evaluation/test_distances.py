"""The Fréchet distance against closed forms and a second way of computing it; precision and recall against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lanternpp.evaluation import distances as pr
from lanternpp.evaluation.distances import frechet, gaussian, standard_error


def draws(count: int, dims: int, seed: int) -> Tensor:
    return torch.randn(count, dims, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exactly(count: int, mean: Tensor, root: Tensor) -> Tensor:
    """Points whose sample mean is `mean` and whose sample covariance is root^T root, to rounding."""
    points = draws(count, len(mean), 0)
    points = points - points.mean(0)
    points = torch.linalg.qr(points).Q * math.sqrt(count - 1)  # identity covariance; its mean stays 0
    return points @ root + mean


def second(one: Tensor, other: Tensor) -> float:
    """The formula itself in NumPy, by the eigenvalues of the unsymmetric product."""
    a, b = one.numpy(), other.numpy()
    product = np.cov(a, rowvar=False) @ np.cov(b, rowvar=False)
    roots = np.sqrt(np.linalg.eigvals(product).astype(complex)).real.sum()
    trace = a.var(0, ddof=1).sum() + b.var(0, ddof=1).sum()
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + trace - 2 * roots)


def test_gaussians_with_a_closed_form() -> None:
    scales, others = torch.tensor([1.0, 2.0, 0.5]).double(), torch.tensor([3.0, 2.0, 1.5]).double()
    shift = torch.tensor([1.0, 0.0, -2.0]).double()
    one = gaussian(exactly(50, torch.zeros(3).double(), scales.diag()))
    other = gaussian(exactly(40, shift, others.diag()))
    closed = shift.square().sum() + (scales - others).square().sum()
    assert frechet(one, other) == pytest.approx(closed.item(), rel=1e-12)


def test_covariances_that_do_not_commute() -> None:
    """Two rank-one Gaussians along u and v: |u|^2 + |v|^2 - 2 |u . v|, where a naive root is singular."""
    u, v = torch.tensor([3.0, 0.0]).double(), torch.tensor([1.0, 2.0]).double()
    line = torch.linspace(-1, 1, 21).double()
    line = line / line.std()
    one, other = gaussian(line[:, None] * u), gaussian(line[:, None] * v)
    assert frechet(one, other) == pytest.approx(9 + 5 - 2 * 3, rel=1e-12)


@pytest.mark.parametrize(("count", "dims"), [(500, 16), (40, 24), (9, 32)])
def test_a_second_implementation_agrees(count: int, dims: int) -> None:
    one = draws(count, dims, 1) @ draws(dims, dims, 2) + 1
    other = draws(300, dims, 3) @ draws(dims, dims, 4)
    assert frechet(gaussian(one), gaussian(other)) == pytest.approx(second(one, other), rel=1e-6)


def test_the_spread_is_the_standard_deviation_over_new_pictures() -> None:
    reference = gaussian(draws(400, 6, 9) + 0.7)
    sets = [draws(160, 6, seed) for seed in range(100, 160)]
    real = torch.tensor([frechet(gaussian(points), reference) for points in sets]).std().item()
    reported = torch.tensor([standard_error(points, reference) for points in sets]).mean().item()
    assert reported == pytest.approx(real, rel=0.3)


def test_too_few_pictures_have_no_spread() -> None:
    assert math.isnan(standard_error(draws(3, 4, 0), gaussian(draws(9, 4, 1))))


def brute(points: Tensor, manifold: Tensor, k: int) -> float:
    """The definition, one pair at a time."""
    inside = 0
    for point in points:
        for i, centre in enumerate(manifold):
            others = sorted((centre - x).norm().item() for j, x in enumerate(manifold) if j != i)
            if (point - centre).norm().item() <= others[k - 1] + 1e-12:
                inside += 1
                break
    return inside / len(points)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("chunk", [7, 1000])
def test_brute_force_agrees(k: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pr, "CHUNK", chunk)
    random = torch.Generator().manual_seed(k)
    generated = torch.randn(40, 3, generator=random).double() * 1.6
    reference = torch.randn(30, 3, generator=random).double()
    precision, recall = pr.precision_recall(generated, reference, k)
    assert precision == pytest.approx(brute(generated, reference, k))
    assert recall == pytest.approx(brute(reference, generated, k))
    assert 0.1 < precision < 0.95 and precision != recall  # a case that could tell a mistake


def test_by_hand() -> None:
    """On a line with k = 3: 0, 1, 2, 3 reach 3, 2, 2, 3, so what lies in [-3, 6] is within."""
    reference = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    assert pr.radii(reference.double(), 3).tolist() == [3, 2, 2, 3]
    generated = torch.tensor([[-3.1], [-2.9], [5.9], [6.1], [100.0]])
    precision, _ = pr.precision_recall(generated, reference)
    assert precision == pytest.approx(2 / 5)
