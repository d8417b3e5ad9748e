"""Probes: one batch drawn with a given tree, with the seconds of its steps and the acceptance of its children.

A plain step follows every step of the tree, so that both meet the same machine: what else runs there, and how warm it
is, then matters little to what one takes in terms of the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import AcceptanceByRank
from lanternpp.evaluation.stopwatch import PHASES, Stopwatch
from lanternpp.trees.shapes import Shape

TRIM = 0.2  # share of the steps left out of a mean at either end, as other work disturbs them


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

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return asdict(self)


class _TimedEngine:
    """An engine whose steps are timed. It must be new."""

    def __init__(self, engine: Engine):
        self.engine, self.watch = engine, Stopwatch(engine)
        self.spans: list[dict[str, float]] = []

    def admit(self, conditions: Sequence[str | None], seeds: Sequence[int]) -> float:
        """A whole batch enters; seconds per sample."""
        began = now(self.engine)
        for slot, (condition, seed) in enumerate(zip(conditions, seeds, strict=True)):
            self.engine.admit(slot, condition, seed)
        begin = now(self.engine) - began
        self.watch.take(begin)
        return begin / self.engine.batch

    def step(self) -> None:
        """One step, without the time of counting what it kept."""
        began = now(self.engine)
        self.engine.step()
        span = self.watch.take(now(self.engine) - began)
        self.spans.append(span | {"rest": span["rest"] - self.watch.observed})

    def seconds_of(self, *parts: str) -> float:
        """Seconds that parts of a step took."""
        return trimmed([sum(span[part] for part in parts) for span in self.spans])

    def skip_to(self, count: torch.Tensor) -> None:
        """Move every sample on to this code. The cache slots skipped hold no keys, which does not change the timing."""
        skipped = (count - self.engine.count).clamp(min=0)
        self.engine.count += skipped
        self.engine.proposer.count += skipped
        self.engine.cache.used += self.engine.guidance.rows(skipped)


def probe(
    engine: Engine,
    plain: Engine,
    shape: Shape,
    conditions: Sequence[str | None],
    seeds: Sequence[int],
    pixels: Callable[[torch.Tensor], object],
) -> Probe:
    """Draw a batch, timing every step, beside an engine of plain decoding; both must be new.

    shape: of the engine's static tree. One condition and seed for each sample of the batch.
    """
    tree, plain_engine = _TimedEngine(engine), _TimedEngine(plain)
    counts = AcceptanceByRank(engine.target.length)
    engine.observers.append(counts)
    begin, plain_begin = tree.admit(conditions, seeds), plain_engine.admit(conditions, seeds)
    while len(engine.done()) < engine.batch:
        plain_engine.skip_to(engine.count.clamp(max=engine.target.length - 1))
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
    )


def trimmed(values: Sequence[float]) -> float:
    """The mean without the `TRIM` least and greatest."""
    ordered = sorted(values)
    cut = int(len(ordered) * TRIM)
    inner = ordered[cut : len(ordered) - cut]
    return sum(inner) / len(inner)


def now(engine: Engine) -> float:
    """Seconds on a clock, once the engine's device has nothing left to do."""
    if engine.codes.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
