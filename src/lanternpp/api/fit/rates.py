"""Acceptance rates by depth and rank: a fact of a model, its drafter, a method and its strength, and of no machine.

They lie beside the drafter, or beside the model for methods without one, in `acceptance.json`. For what has no row there they
are counted while pictures are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lanternpp.api.options import Settings
from lanternpp.engine.observers import AcceptanceByRank
from lanternpp.engine.verify.choose import TOKEN
from lanternpp.errors import InputError
from lanternpp.trees.search import expected
from lanternpp.trees.shapes import Shape
from lanternpp.types import TargetOutput
from lanternpp.util.jsonfile import read_object
from lanternpp.util.schema import made

FILE = "acceptance.json"
ENOUGH = 200  # passes after which counting ends: codes per pass are then known to about 5 %
EVERY = 32  # steps after which counts are saved, as a process may end with any picture
DECIDING = ("proposer", "accept", "neighbours", "delta", "lam", "nu", "residual", "coupling", "init", "alternatives", "window_rows")  # fmt: skip
SAMPLED = ("cfg", "temperature", "top_k", "top_p")

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Counts:
    """Children of drafts, [depth][rank] each, as `AcceptanceByRank` counts them, and the passes that they were counted in."""

    tried: Rows
    kept: Rows
    passes: int

    @classmethod
    def of(cls, counter: AcceptanceByRank) -> Counts:
        """What an observer has counted."""
        tried, kept = (tuple(map(tuple, x.tolist())) for x in (counter.tried, counter.kept))
        return cls(tried, kept, int(counter.passes))

    def __add__(self, other: Counts) -> Counts:
        """Both together, as deep and wide as the smaller one."""

        def added(one: Rows, two: Rows) -> Rows:
            return tuple(
                tuple(x + y for x, y in zip(*rows, strict=False)) for rows in zip(one, two, strict=False)
            )

        return Counts(
            added(self.tried, other.tried), added(self.kept, other.kept), self.passes + other.passes
        )

    @property
    def size(self) -> tuple[int, int]:
        """Depths and ranks."""
        return len(self.tried), min(map(len, self.tried), default=0)

    def codes(self, shape: Shape) -> float:
        """Expected codes per pass of a draft of this shape, which must be within `size`."""
        ranks = self.size[1]
        tried, kept = (
            torch.tensor([row[:ranks] for row in x], dtype=torch.float64) for x in (self.tried, self.kept)
        )
        table: Tensor = (kept + 0.5) / (tried + 1)  # where nothing was tried, even odds that nothing rests on
        return expected(table, shape)


class Counter(AcceptanceByRank):
    """Counts the acceptance of an engine's drafts and hands the counts over now and then, until they are enough.

    save: takes the counts since the last call; returns whether more are wanted.
    """

    def __init__(self, length: int, save: Callable[[Counts], bool]):
        super().__init__(length)
        self.save, self.steps, self.wanted = save, 0, True

    def verified(self, output: TargetOutput, count: Tensor) -> None:
        """Count the children along every accepted path."""
        if not self.wanted:
            return
        super().verified(output, count)
        self.steps += 1
        if self.steps % EVERY == 0:
            self.wanted = self.save(Counts.of(self))
            for tally in (self.tried, self.kept, self.passes, self.codes):
                tally.zero_()


def strength(settings: Settings) -> dict[str, Any]:
    """What decides acceptance rates, besides the weights: the method's parts, their dials and the sampling.

    Block and traversal verification are one algorithm.
    """
    values = {name: getattr(settings, name) for name in (*DECIDING, *SAMPLED)}
    return {name: value for name, value in values.items() if value is not None} | {
        "joint": is_joint(settings)
    }


def is_joint(settings: Settings) -> bool:
    """Whether a draft is verified as a whole and not token by token."""
    return settings.verify not in (None, TOKEN)


@dataclass(frozen=True)
class _Row:
    strength: Mapping[str, Any]
    counts: Counts


@dataclass(frozen=True)
class _File:
    acceptance: tuple[_Row, ...]


def read_rates(folder: Path | None) -> tuple[tuple[Mapping[str, Any], Counts], ...]:
    """The rows of a folder's `acceptance.json`, each a `strength` and its counts; () where there is none. InputError."""
    path = folder / FILE if folder else None
    if path is None or not path.is_file():
        return ()
    try:
        rows = made(_File, read_object(path)).acceptance
        for row in rows:
            check_counts(row.counts)
    except InputError as error:
        raise InputError(f"{path} is damaged ({error}); train the drafter again, or remove it") from None
    return tuple((row.strength, row.counts) for row in rows)


def check_counts(counts: Counts) -> None:
    """InputError unless the counts can be acceptance rates."""
    depth, ranks = counts.size
    alike = [len(row) for row in counts.tried] == [len(row) for row in counts.kept]
    pairs = [
        pair for rows in zip(counts.tried, counts.kept, strict=False) for pair in zip(*rows, strict=False)
    ]
    if not depth or not ranks or not alike or counts.passes < 1 or not all(0 <= k <= t for t, k in pairs):
        raise InputError("its counts are no counts of accepted children")
