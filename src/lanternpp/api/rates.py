"""Acceptance rates by depth and rank: a fact of a model, its drafter, a method and its strength, and of no machine.

The rates lie in `acceptance.json` beside the drafter, or beside the model for methods without a drafter. Rates of methods that
have no row there are counted while pictures are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lanternpp.api.options import SamplingDials, Settings, names
from lanternpp.api.settings import PART_DIALS, SHAPE_DIALS, is_joint
from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import AcceptanceByRank
from lanternpp.errors import InputError
from lanternpp.trees.search import expected_codes
from lanternpp.trees.static import Shape
from lanternpp.types import TargetOutput
from lanternpp.util.jsonfile import key_of, read_object, validated

FILE = "acceptance.json"
SAVE_INTERVAL = 32  # steps after which counts are saved, as a process may end with any picture
# `strength` has `joint` in place of `verify`.
RATE_DIALS = ("proposer", "accept", *(name for name in PART_DIALS if name not in SHAPE_DIALS | {"verify"}))

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
        same_ranks = [*map(len, self.tried)] == [*map(len, self.kept)]
        pairs = zip(sum(self.tried, ()), sum(self.kept, ()), strict=True)
        possible = same_ranks and all(0 <= kept <= tried for tried, kept in pairs)
        if not possible or not all(self.size) or self.passes < 1:
            raise InputError("its counts are no counts of accepted children")

    @classmethod
    def of(cls, counter: AcceptanceByRank) -> Counts:
        """Return the counts of an observer, of one pass or more."""
        tried = tuple(map(tuple, counter.tried.tolist()))
        return cls(tried, tuple(map(tuple, counter.kept.tolist())), int(counter.passes))

    def __add__(self, other: Counts) -> Counts:
        """Return the sum, as deep and wide as the smaller of both."""
        tried = tuple(tuple(map(add, *rows)) for rows in zip(self.tried, other.tried, strict=False))
        kept = tuple(tuple(map(add, *rows)) for rows in zip(self.kept, other.kept, strict=False))
        return Counts(tried, kept, self.passes + other.passes)

    @property
    def size(self) -> tuple[int, int]:
        """Depths and ranks."""
        return len(self.tried), min(map(len, self.tried), default=0)

    def cover(self, shape: Shape) -> bool:
        """Return whether acceptance is known at all depths and ranks of a shape."""
        depth, ranks = self.size
        return max(map(len, shape)) <= depth and max(map(max, shape)) < ranks

    def codes(self, shape: Shape) -> float:
        """Return the expected codes per pass of a draft of this shape, which the counts must `cover`."""
        ranks = self.size[1]
        tried = torch.tensor([row[:ranks] for row in self.tried], dtype=torch.float64)  # [depth, rank]
        kept = torch.tensor([row[:ranks] for row in self.kept], dtype=torch.float64)
        # Children that were never tried get even odds.
        return expected_codes((kept + 0.5) / (tried + 1), shape)


def passes(length: int, codes: float) -> float:
    """Return the passes after the prefill for a picture of `length` codes, at a mean of `codes` codes per pass."""
    # Of the codes that the last draft decides beyond the first, half lie after the end, on average.
    return (length - 1 + (codes - 1) / 2) / codes


class Counter(AcceptanceByRank):
    """Observer that counts the acceptance of an engine's drafts and saves the counts at intervals, until enough are saved.

    It then leaves the engine's observers: while it counts, a step is not one call of C. save: takes the counts since the last
    call, and returns whether more are needed.
    """

    def __init__(self, engine: Engine, save: Callable[[Counts], bool]):
        super().__init__(engine.target.length)
        self.observers, self.save, self.steps = engine.observers, save, 0
        self.observers.append(self)

    def verified(self, output: TargetOutput, count: Tensor) -> None:
        """Count the children along every accepted path."""
        super().verified(output, count)
        self.steps += 1
        if self.steps % SAVE_INTERVAL == 0 and int(self.passes):
            if not self.save(Counts.of(self)):
                self.observers.remove(self)
            for tally in (self.tried, self.kept, self.passes, self.codes):
                tally.zero_()


def strength(settings: Settings) -> dict[str, Any]:
    """Return the settings that decide acceptance rates, besides the weights: the method's parts, their dials and the sampling."""
    values = {name: getattr(settings, name) for name in (*RATE_DIALS, *names(SamplingDials))}
    # Block and traversal verification are one algorithm.
    values["joint"] = is_joint(settings)
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class _Row:
    strength: Mapping[str, Any]
    counts: Counts


def read_rates(folder: Path) -> dict[str, Counts]:
    """Read the counts in a folder's `acceptance.json`, if any, and return them by the keys of their strengths; raise InputError."""
    path = folder / FILE
    try:
        content = read_object(path).get("acceptance") if path.is_file() else ()
        rows = validated("acceptance", content, tuple[_Row, ...])
    except InputError as error:
        raise InputError(f"{path} is damaged ({error}); train the drafter again, or remove it") from None
    return {key_of(row.strength): row.counts for row in rows}
