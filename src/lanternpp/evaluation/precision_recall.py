"""Improved precision and recall (arXiv 1904.06991): the share of one set that lies within the other's manifold."""

from __future__ import annotations

import torch
from torch import Tensor

NEAREST = 3  # k of the paper
CHUNK = 1024


def precision_recall(generated: Tensor, reference: Tensor, k: int = NEAREST) -> tuple[float, float]:
    """Features [M, F] and [N, F], both longer than k -> (precision, recall), each 0 to 1 (equation 2).

    Precision is the share of generated pictures within the reference's manifold: closer to some reference
    picture than that one's k-th nearest other. Recall is the same the other way round.
    """
    generated, reference = generated.double(), reference.double()
    return within(generated, reference, k), within(reference, generated, k)


def within(points: Tensor, manifold: Tensor, k: int) -> float:
    """The share of points [M, F] that lie in a ball around one of manifold [N, F] (equation 1)."""
    radius = radii(manifold, k)
    inside = [(torch.cdist(part, manifold) <= radius).any(1) for part in points.split(CHUNK)]
    return torch.cat(inside).double().mean().item()


def radii(features: Tensor, k: int) -> Tensor:
    """Distance of each of features [N, F] to its k-th nearest other, [N]."""
    found = []
    for start in range(0, len(features), CHUNK):
        distances = torch.cdist(features[start : start + CHUNK], features)
        rows = torch.arange(len(distances), device=features.device)
        distances[rows, rows + start] = torch.inf  # a picture is not its own neighbour
        found.append(distances.kthvalue(k, 1).values)
    return torch.cat(found)
