"""Acceptance rates by depth and rank: a fact of a model, its drafter, a method and its strength, and of no machine.

They lie beside the drafter, or beside the model for methods without one, in `acceptance.json`. For what has no row there they
are counted while pictures are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lanternpp.api.options import DraftDials, RuleDials, Settings, names
from lanternpp.api.settings import is_joint
from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import AcceptanceByRank
from lanternpp.errors import InputError
from lanternpp.trees.search import expected
from lanternpp.trees.static import Shape
from lanternpp.types import TargetOutput
from lanternpp.util.jsonfile import checked, key_of, read_object

FILE = "acceptance.json"
EVERY = 32  # steps after which counts are saved, as a process may end with any picture
SHAPING = {"tree", "window", "verify", "min_survival"}  # `verify` is there as `joint`
DECIDING = ("proposer", "accept", *(x for x in names(DraftDials, RuleDials) if x not in SHAPING))
SAMPLED = ("cfg", "temperature", "top_k", "top_p")

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Counts:
    """Children of drafts, [depth][rank] each, as `AcceptanceByRank` counts them, and the passes that they were counted in.

    Raises InputError where these cannot be counts.
    """

    tried: Rows
    kept: Rows
    passes: int

    def __post_init__(self) -> None:
        tried, kept = sum(self.tried, ()), sum(self.kept, ())
        alike = [*map(len, self.tried)] == [*map(len, self.kept)]
        possible = alike and all(0 <= k <= t for t, k in zip(tried, kept, strict=True))
        if not possible or not all(self.size) or self.passes < 1:
            raise InputError("its counts are no counts of accepted children")

    @classmethod
    def of(cls, counter: AcceptanceByRank) -> Counts:
        """The counts of an observer, of one pass or more."""
        tried, kept = (tuple(map(tuple, x.tolist())) for x in (counter.tried, counter.kept))
        return cls(tried, kept, int(counter.passes))

    def __add__(self, other: Counts) -> Counts:
        """Both together, as deep and wide as the smaller one."""
        pairs = (self.tried, other.tried), (self.kept, other.kept)
        tried, kept = (tuple(tuple(map(add, *rows)) for rows in zip(*x, strict=False)) for x in pairs)
        return Counts(tried, kept, self.passes + other.passes)

    @property
    def size(self) -> tuple[int, int]:
        """Depths and ranks."""
        return len(self.tried), min(map(len, self.tried), default=0)

    def cover(self, shape: Shape) -> bool:
        """Whether acceptance is known at all depths and ranks of a shape."""
        depth, ranks = self.size
        return max(map(len, shape)) <= depth and max(map(max, shape)) < ranks

    def codes(self, shape: Shape) -> float:
        """Expected codes per pass of a draft of this shape, which they must `cover`."""
        rows = (zip(*pair, strict=True) for pair in zip(self.tried, self.kept, strict=True))
        rates = [[(kept + 0.5) / (tried + 1) for tried, kept in row] for row in rows]  # untried: even odds
        return expected(torch.tensor([row[: self.size[1]] for row in rates], dtype=torch.float64), shape)


def passes(length: int, codes: float) -> float:
    """Passes after the prefill for a picture of `length` codes, of so many codes each.

    Of the codes that its last draft decides beyond the first, half lie after the end, on average.
    """
    return (length - 1 + (codes - 1) / 2) / codes


class Counter(AcceptanceByRank):
    """Counts the acceptance of an engine's drafts and hands the counts over now and then, until they are enough.

    It then leaves the engine's observers: while it counts, a step is not one call of C. save: takes the counts since the last
    call; returns whether more are needed.
    """

    def __init__(self, engine: Engine, save: Callable[[Counts], bool]):
        super().__init__(engine.target.length)
        self.observers, self.save, self.steps = engine.observers, save, 0
        self.observers.append(self)

    def verified(self, output: TargetOutput, count: Tensor) -> None:
        """Count the children along every accepted path."""
        super().verified(output, count)
        self.steps += 1
        if self.steps % EVERY == 0 and int(self.passes):
            if not self.save(Counts.of(self)):
                self.observers.remove(self)
            for tally in (self.tried, self.kept, self.passes, self.codes):
                tally.zero_()


def strength(settings: Settings) -> dict[str, Any]:
    """The settings that decide acceptance rates, besides the weights: the method's parts, their dials and the sampling.

    Block and traversal verification are one algorithm.
    """
    values = {name: getattr(settings, name) for name in (*DECIDING, *SAMPLED)}
    return {k: v for k, v in values.items() if v is not None} | {"joint": is_joint(settings)}


@dataclass(frozen=True)
class _Row:
    strength: Mapping[str, Any]
    counts: Counts


def read_rates(folder: Path) -> dict[str, Counts]:
    """The counts in a folder's `acceptance.json`, by the keys of their strengths; none where there is no file. InputError."""
    path = folder / FILE
    try:
        content = read_object(path).get("acceptance") if path.is_file() else ()
        rows = checked("acceptance", content, tuple[_Row, ...])
    except InputError as error:
        raise InputError(f"{path} is damaged ({error}); train the drafter again, or remove it") from None
    return {key_of(row.strength): row.counts for row in rows}
