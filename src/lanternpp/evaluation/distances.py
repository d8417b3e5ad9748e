"""Distances of two sets of features: Fréchet distance, precision and recall."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

JACKKNIFE_PARTS = 16
NEAREST = 3  # k of precision and recall
CHUNK = 1024


@dataclass(frozen=True)
class Gaussian:
    """Mean [F] and covariance root^T root, root [R, F], of some features; float64."""

    mean: Tensor
    root: Tensor


def gaussian(features: Tensor) -> Gaussian:
    """The moments of features [M, F], M >= 2; R = min(M, F)."""
    features = features.double()
    mean = features.mean(0)
    centred = (features - mean) / math.sqrt(len(features) - 1)
    return Gaussian(mean, centred if len(features) <= len(mean) else torch.linalg.qr(centred, mode="r").R)


def frechet(one: Gaussian, other: Gaussian) -> float:
    """|m - m'|^2 + tr(C + C' - 2 (C C')^(1/2)), at least 0 (FID, arXiv 1706.08500, section 3).

    With C = A^T A and C' = B^T B the product C C' has the eigenvalues of (A B^T)(A B^T)^T, so the trace of
    its square root is the sum of the singular values of A B^T. No matrix root is taken, and a singular
    covariance loses no digits.
    """
    means = (one.mean - other.mean).square().sum()
    shared = torch.linalg.svdvals(one.root @ other.root.T).sum()
    return max((means + one.root.square().sum() + other.root.square().sum() - 2 * shared).item(), 0.0)


def standard_error(features: Tensor, reference: Gaussian, parts: int = JACKKNIFE_PARTS) -> float:
    """The standard error of the Fréchet distance of features [M, F] from a reference, by a jackknife over `parts`.

    The pictures are the random part, the reference is held fixed. The bias of few pictures, which makes
    every distance too long, is not in it.
    """
    parts = min(parts, len(features) // 2)
    if parts < 2:
        return math.nan
    # shuffled, as pictures come prompt by prompt
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
    group = (order % parts).to(features.device)
    left = [frechet(gaussian(features[group != part]), reference) for part in range(parts)]
    without = torch.tensor(left, dtype=torch.float64)
    return math.sqrt((parts - 1) * without.var(correction=0).item())


def precision_recall(generated: Tensor, reference: Tensor, k: int = NEAREST) -> tuple[float, float]:
    """Features [M, F] and [N, F], both longer than k -> (precision, recall), each 0 to 1 (arXiv 1904.06991, equation 2).

    Precision is the share of generated pictures within the reference's manifold: closer to some reference
    picture than that one's k-th nearest other. Recall is the same the other way round.
    """
    generated, reference = generated.double(), reference.double()
    return share_within(generated, reference, k), share_within(reference, generated, k)


def share_within(points: Tensor, manifold: Tensor, k: int) -> float:
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
        # a picture is not its own neighbour
        distances[rows, rows + start] = torch.inf
        found.append(distances.kthvalue(k, 1).values)
    return torch.cat(found)
