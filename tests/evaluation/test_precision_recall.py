"""Improved precision and recall against brute force and cases that can be worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lanternpp.evaluation import precision_recall as pr


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


def test_a_set_against_itself_and_against_one_far_away() -> None:
    points = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    assert pr.precision_recall(points, points) == (1, 1)
    assert pr.precision_recall(points, points + 100) == (0, 0)


def test_few_kinds_of_pictures_are_precise_and_recall_little() -> None:
    random = torch.Generator().manual_seed(1)
    places = torch.randn(20, 4, generator=random) * 30
    reference = (places[:, None] + torch.randn(20, 10, 4, generator=random)).flatten(0, 1)
    one = reference[:10].repeat(4, 1) + 0.1 * torch.randn(40, 4, generator=random)
    precision, recall = pr.precision_recall(one, reference)
    assert precision > 0.9 and recall < 0.15
