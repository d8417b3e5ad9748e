"""One candidate drawn and timed beside plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lanternpp.api.fit.steps import MidwayEngine
from lanternpp.api.options import Settings
from lanternpp.api.pipeline import Pipeline
from lanternpp.engine.observers import AcceptanceByRank
from lanternpp.engine.stopwatch import PHASES, TimedEngine, now, trimmed


@dataclass(frozen=True)
class Drawn:
    """A batch of pictures by one candidate. Seconds are of a picture, or of a step, at the present speed of the machine."""

    relative: float  # seconds of a picture over those of plain decoding
    codes_per_pass: float  # of whole pictures, the prefill among the passes
    step: float
    phases: dict[str, float]  # of a step
    plain_step: float
    nodes: int  # draft tokens of a pass
    tried: list[list[float]]  # children verified, [depth, rank], as `AcceptanceByRank` counts them
    kept: list[list[float]]

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return asdict(self)


class PlainEngine:
    """Plain decoding beside which candidates are timed: one of its steps follows each of theirs.

    Both meet the same machine then: what else runs there, and how warm it is, matters little to what one takes in terms of the other.
    """

    def __init__(self, pipe: Pipeline, settings: Settings, prompt: str | None):
        engine = pipe.new_engine(settings)
        began = now(engine)
        for slot in range(engine.batch):
            engine.admit(slot, prompt, slot)
        prefill = (now(engine) - began) / engine.batch
        self.midway = MidwayEngine(engine)
        self.prefill_steps = prefill / self.midway.step().step

    def picture(self, step: float, length: int) -> float:
        """Seconds of a picture without its pixels, where a step takes so many."""
        return step * (self.prefill_steps + length - 1)


def draw(
    pipe: Pipeline, settings: Settings, plain: PlainEngine, prompt: str | None, seeds: Sequence[int]
) -> Drawn:
    """Draw a batch in an engine of its own, timing every step."""
    engine, length = pipe.new_engine(settings), pipe.target.length
    timed, counts = TimedEngine(engine), AcceptanceByRank(length)
    engine.observers.append(counts)
    prefill = timed.admit([prompt] * engine.batch, seeds)
    plain_steps = []
    while len(engine.done()) < engine.batch:
        timed.step()
        plain_steps.append(plain.midway.step().step)
    began = now(engine)
    samples = [engine.collect(slot) for slot in range(engine.batch)]
    pipe.images(torch.stack([sample.codes for sample in samples]))
    pixels = (now(engine) - began) / engine.batch
    step, plain_step = timed.seconds_of(*PHASES), trimmed(plain_steps)
    passes = sum(len(sample.accepted) for sample in samples) / engine.batch
    seconds = prefill + (passes - 1) * step + pixels
    return Drawn(
        seconds / (plain.picture(plain_step, length) + pixels),
        length / passes,
        step,
        {phase: timed.seconds_of(phase) for phase in PHASES},
        plain_step,
        engine.proposer.size - 1,
        counts.tried.double().tolist(),
        counts.kept.double().tolist(),
    )
