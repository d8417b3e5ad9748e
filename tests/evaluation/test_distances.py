"""The Fréchet distance against a closed form and a second way of computing it; precision and recall against brute force."""

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


def second(one: Tensor, other: Tensor) -> float:
    """The formula itself in NumPy, by the eigenvalues of the unsymmetric product."""
    a, b = one.numpy(), other.numpy()
    product = np.cov(a, rowvar=False) @ np.cov(b, rowvar=False)
    roots = np.sqrt(np.linalg.eigvals(product).astype(complex)).real.sum()
    trace = a.var(0, ddof=1).sum() + b.var(0, ddof=1).sum()
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + trace - 2 * roots)


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


def brute(points: Tensor, manifold: Tensor) -> float:
    """The definition, one pair at a time."""
    inside = 0
    for point in points:
        for i, centre in enumerate(manifold):
            others = sorted((centre - x).norm().item() for j, x in enumerate(manifold) if j != i)
            if (point - centre).norm().item() <= others[2] + 1e-12:
                inside += 1
                break
    return inside / len(points)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_brute_force_agrees(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the three neighbours of the paper."""
    monkeypatch.setattr(pr, "CHUNK", chunk)
    random = torch.Generator().manual_seed(7)
    generated = torch.randn(40, 3, generator=random).double() * 1.6
    reference = torch.randn(30, 3, generator=random).double()
    precision, recall = pr.precision_recall(generated, reference)
    assert precision == pytest.approx(brute(generated, reference))
    assert recall == pytest.approx(brute(reference, generated))
    assert 0.1 < precision < 0.95 and precision != recall  # a case that could tell a mistake
