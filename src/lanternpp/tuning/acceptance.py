"""How often children are kept, by depth and rank: counted while drawing, and fitted where few were counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lanternpp.engine.observers import Observer
from lanternpp.trees.shapes import Shape, is_chain
from lanternpp.types import TargetOutput

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


@dataclass(frozen=True)
class Acceptances:
    """Acceptance tables [D, K], of trees that branch and of chains: these keep more where they alone are verified together.

    Under block and traversal verification too, whether a node is kept, or one below it, depends on its ancestors and on the
    siblings before it and on no other node, so that a table is all there is to know. It is the same table for both, as a chain
    is verified by traversal as it is by block.
    """

    trees: Tensor
    chains: Tensor

    def of(self, shape: Shape) -> Tensor:
        """The table that a shape's children follow."""
        return self.chains if is_chain(shape) else self.trees


class CutCounts(Observer):
    """Counts what chains would keep and how long they would be if they were cut, for several cuts, from chains that are not.

    A guess is kept whatever stands behind it with the same probability, and whether a cut comes before it is known from the
    guesses before. So of the same drafts the guesses in front of a cut are what is kept with it.
    """

    def __init__(self, cuts: Sequence[float], length: int):
        self.cuts, self.length = cuts, length  # codes of an image

    def verified(self, output: TargetOutput, count: Tensor) -> None:
        """Count guesses that are in front of a cut and kept, and passes in which some chain has so many guesses."""
        survival, verdict = output.draft.survival, output.verdict
        assert survival is not None
        depth, device = survival.shape[1], survival.device
        if not hasattr(self, "kept"):
            self.kept, self.longest = torch.zeros(2, len(self.cuts), depth, dtype=torch.int64, device=device)
            self.drafts = torch.zeros(2, dtype=torch.int64, device=device)  # drafts, passes
            self._least = torch.tensor(self.cuts, dtype=survival.dtype, device=device)[:, None, None]
        level = torch.arange(depth, device=device)
        whole = (count + depth + 1 <= self.length)[:, None]
        there = ((survival >= self._least) | (level == 0)) & whole  # [C, B, D]
        self.kept += (there & (verdict.kept[:, None] > level + 1)).sum(1)
        self.longest += there.any(1)
        self.drafts += torch.stack((whole.sum(), whole.any()))

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, of which `CutChains.of` takes several."""
        drafts, passes = self.drafts.tolist()
        counts = {"kept": self.kept.tolist(), "longest": self.longest.tolist()}
        return {"drafts": drafts, "passes": passes, **counts}


@dataclass(frozen=True)
class CutChains:
    """What is kept of chains that are cut, and how long they are; rows are cuts, columns the levels of the longest chain measured."""

    cuts: tuple[float, ...]
    kept: Tensor  # [C, D] how often a draft has a guess that is kept, of those that long
    longest: Tensor  # [C, D] how often some chain of a pass has a guess

    @classmethod
    def of(cls, cuts: Sequence[float], counts: Sequence[Mapping[str, Any]]) -> CutChains | None:
        """From the counts of several probes; None where there are none."""
        depth = max((len(one["kept"][0]) for one in counts if one["passes"]), default=0)
        if not depth:
            return None
        shares = []
        for name, unit in (("kept", "drafts"), ("longest", "passes")):
            total, units = torch.zeros(len(cuts), depth).double(), torch.zeros(depth).double()
            for one in counts:
                table = torch.tensor(one[name], dtype=torch.float64)
                total[:, : table.shape[1]] += table
                units[: table.shape[1]] += one[unit]
            shares.append((total / units.clamp(min=1)).cummin(1).values)
        return cls(tuple(cuts), *shares)

    def codes(self, place: int, depth: int) -> float:
        """Codes that a draft decides with the cut of this place, in chains of at most so many guesses."""
        return 1 + float(self.kept[place, :depth].sum())

    def lengths(self, place: int, depth: int) -> list[float]:
        """How often the longest chain of a pass has 1, 2 .. guesses."""
        reached = self.longest[place, :depth]
        return (reached - torch.cat((reached[1:], reached.new_zeros(1)))).tolist()


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
