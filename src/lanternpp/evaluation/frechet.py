"""The Fréchet distance of two sets of features taken as Gaussians (FID, arXiv 1706.08500, section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PARTS = 16  # of the jackknife


@dataclass(frozen=True)
class Gaussian:
    """Mean [F] and covariance root^T root, root [R, F], of some features; float64."""

    mean: Tensor
    root: Tensor


def gaussian(features: Tensor) -> Gaussian:
    """The moments of features [M, F], M >= 2. R = min(M, F), so fewer pictures than features are no trouble."""
    features = features.double()
    mean = features.mean(0)
    centred = (features - mean) / math.sqrt(len(features) - 1)
    return Gaussian(mean, centred if len(features) <= len(mean) else torch.linalg.qr(centred, mode="r").R)


def distance(one: Gaussian, other: Gaussian) -> float:
    """|m - m'|^2 + tr(C + C' - 2 (C C')^(1/2)), at least 0.

    With C = A^T A and C' = B^T B the product C C' has the eigenvalues of (A B^T)(A B^T)^T, so the trace of
    its square root is the sum of the singular values of A B^T. No matrix root is taken, and a singular
    covariance loses no digits.
    """
    apart = (one.mean - other.mean).square().sum()
    shared = torch.linalg.svdvals(one.root @ other.root.T).sum()
    return max((apart + one.root.square().sum() + other.root.square().sum() - 2 * shared).item(), 0.0)


def standard_error(features: Tensor, reference: Gaussian, parts: int = PARTS) -> float:
    """The standard error of the distance of features [M, F] from a reference, by a jackknife over `parts`.

    The pictures are the random part, the reference is held fixed. The bias of few pictures, which makes
    every distance too long, is not in it.
    """
    parts = min(parts, len(features) // 2)
    if parts < 2:
        return math.nan
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))  # not prompt by prompt
    group = (order % parts).to(features.device)
    left = [distance(gaussian(features[group != part]), reference) for part in range(parts)]
    without = torch.tensor(left, dtype=torch.float64)
    return math.sqrt((parts - 1) * without.var(correction=0).item())
