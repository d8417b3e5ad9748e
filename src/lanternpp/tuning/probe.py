"""Probes: one batch drawn with a given tree, with the seconds of its steps and the acceptance of its children.

A plain step follows every step of the tree, so that both meet the same machine: what else runs there, and how warm it
is, then matters little to what one takes in terms of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import AcceptanceByRank, Observer
from lanternpp.engine.stopwatch import PHASES, TimedEngine, now
from lanternpp.trees.shapes import Shape
from lanternpp.tuning.acceptance import CutCounts
from lanternpp.types import TargetOutput


@dataclass(frozen=True)
class Probe:
    """What was measured; the fields are keys of `measurements.jsonl`. Seconds are of a step, but for `begin`, `plain_begin` and `pixels`, which are of a picture."""

    shape: list[list[int]]
    plain_begin: float
    plain_look: float
    plain_step: float
    begin: float  # prefill of target and drafter
    draft: float
    look: float  # the target's pass
    judge: float  # verification and all that is left of a step
    pixels: float
    passes: int  # of full drafts, all samples together, the prefill apart
    codes: int  # that they decided
    judged: float  # children judged per pass
    tried: list[list[float]]  # [d, k], as `AcceptanceByRank` counts them
    kept: list[list[float]]
    verify: str = "token"  # the verifier
    min_survival: float = 0.0  # of a chain
    nodes: float | None = None  # mean guesses of a chain that was cut; None: it always had all
    cuts: dict[str, Any] | None = None  # what other cuts would have kept, as `CutCounts` gives it

    @property
    def paths(self) -> Shape:
        """The shape."""
        return tuple(map(tuple, self.shape))

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return asdict(self)


def probe(
    engine: Engine,
    plain: Engine,
    shape: Shape,
    conditions: Sequence[str | None],
    seeds: Sequence[int],
    pixels: Callable[[torch.Tensor], object],
    verify: str = "token",
    min_survival: float = 0.0,
    cuts: Sequence[float] = (),
) -> Probe:
    """Draw a batch, timing every step, beside an engine of plain decoding; both must be new.

    shape: of the engine's static tree. One condition and seed for each sample of the batch. verify and min_survival: the engine's. cuts:
    others that are counted, of chains so rarely cut that they have all guesses.
    """
    tree, plain_engine = TimedEngine(engine), TimedEngine(plain)
    counts, cut_counts = AcceptanceByRank(engine.target.length), CutCounts(cuts, engine.target.length)
    lengths = ChainLengths()
    engine.observers += [
        counts,
        *([cut_counts] if cuts else []),
        *([lengths] if min_survival and not cuts else []),
    ]
    begin, plain_begin = tree.admit(conditions, seeds), plain_engine.admit(conditions, seeds)
    while len(engine.done()) < engine.batch:
        plain_engine.move_to(plain.count.maximum(engine.count.clamp(max=engine.target.length - 1)))
        tree.step()
        plain_engine.step()
    began = now(engine)
    pixels(torch.stack([engine.collect(slot).codes for slot in range(engine.batch)]))
    finished = (now(engine) - began) / engine.batch
    passes, tried = int(counts.passes), counts.tried.double()
    return Probe(
        [list(path) for path in sorted(shape, key=lambda p: (len(p), p))],
        plain_begin,
        plain_engine.seconds_of("pass"),
        plain_engine.seconds_of(*PHASES),
        begin,
        tree.seconds_of("draft"),
        tree.seconds_of("pass"),
        tree.seconds_of("verify", "rest"),
        finished,
        passes,
        int(counts.codes),
        float(tried.sum()) / max(passes, 1),
        tried.tolist(),
        counts.kept.double().tolist(),
        verify,
        min_survival,
        lengths.nodes / lengths.passes if lengths.passes else None,
        cut_counts.to_json() if cuts else None,
    )


class ChainLengths(Observer):
    """The guesses of chains, as long as the longest of a pass."""

    def __init__(self) -> None:
        self.nodes = self.passes = 0

    def verified(self, output: TargetOutput, count: torch.Tensor) -> None:
        """Count the nodes of a pass."""
        self.nodes += output.draft.codes.shape[1] - 1
        self.passes += 1
