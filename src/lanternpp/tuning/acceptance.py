"""How often children are kept, by depth and rank: counted while drawing, and fitted where few were counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT = 20.0  # weight of the fitted curve, in trials
LEAST = 1e-4  # an acceptance is at least this far from 0 and 1


@dataclass(frozen=True)
class Counts:
    """Children judged and children kept, [D, K] each: by the depth of the parent and the rank of the child."""

    tried: Tensor
    kept: Tensor

    @classmethod
    def of(
        cls,
        rows: Iterable[tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]],
        depth: int,
        ranks: int,
    ) -> Counts:
        """The sum of several countings, each two nested lists [d, k] of any size up to [depth, ranks]."""
        whole = cls(*torch.zeros(2, depth, ranks, dtype=torch.float64))
        for tried, kept in rows:
            for total, other in ((whole.tried, tried), (whole.kept, kept)):
                for d, row in enumerate(other):
                    total[d, : len(row)] += torch.tensor(row, dtype=torch.float64)
        return whole

    def table(self) -> Tensor:
        """The acceptances [D, K]: the counts, with `WEIGHT` trials at the fitted acceptance added."""
        fitted = fit_acceptance(self)
        table = (self.kept + WEIGHT * fitted) / (self.tried + WEIGHT)
        return table.clamp(LEAST, 1 - LEAST)


def fit_acceptance(counts: Counts) -> Tensor:
    """A logistic curve in the rank and the depth, fitted to the counts; [D, K].

    log(1 + rank) and log(1 + depth), as both matter less and less, and terms of their own for the first rank
    and the first depth: the first child is the drafter's best guess, and only the root's children rest on
    the target's own features. Newton's method on the likelihood, with a little ridge on all but the mean.
    """
    depth = torch.arange(len(counts.tried), dtype=torch.float64)[:, None].expand_as(counts.tried)
    rank = torch.arange(counts.tried.shape[1], dtype=torch.float64).expand_as(depth)
    columns = (
        torch.ones_like(rank),
        rank.log1p(),
        (rank == 0).double(),
        depth.log1p(),
        (depth == 0).double(),
    )
    x = torch.stack(columns, -1).flatten(0, 1)  # [D K, 5]
    tried, kept = counts.tried.flatten(), counts.kept.flatten()
    ridge = torch.diag(torch.tensor([1e-6, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    share = ((kept.sum() + 0.5) / (tried.sum() + 1)).clamp(LEAST, 1 - LEAST)
    weights = torch.zeros(5, dtype=torch.float64)
    weights[0] = share.logit()
    for _ in range(50):
        p = (x @ weights).sigmoid()
        gradient = x.T @ (kept - tried * p) - ridge @ weights + ridge[:, 0] * weights[0]
        hessian = x.T @ ((tried * p * (1 - p))[:, None] * x) + ridge
        move = torch.linalg.solve(hessian, gradient).clamp(-2, 2)
        weights = weights + move
        if move.abs().max() < 1e-9:
            break
    return (x @ weights).sigmoid().view_as(counts.tried)
