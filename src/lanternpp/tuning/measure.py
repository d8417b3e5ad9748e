"""One candidate drawn and timed beside plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lanternpp.api.fit.steps import warm_step
from lanternpp.api.options import Settings
from lanternpp.api.pipeline import Pipeline
from lanternpp.engine.observers import AcceptanceByRank, TimedEngine, now, trimmed

EACH = 5  # timed steps of a candidate for one of plain decoding


class PlainEngine(TimedEngine):
    """Plain decoding beside which candidates are timed: a step for every `EACH` of theirs.

    Both meet the same machine then: what else runs there, and how warm it is, matters little to their ratio.
    """

    def __init__(self, pipe: Pipeline, settings: Settings, prompt: str | None):
        super().__init__(pipe.new_engine(settings))
        prefill = self.admit([prompt] * settings.batch_size, range(settings.batch_size))
        self.midway_step(first=True)
        self.prefill_steps = prefill / self.midway_step()[0]


def draw(
    pipe: Pipeline, settings: Settings, plain: PlainEngine, prompt: str | None, seeds: Sequence[int]
) -> dict[str, Any]:
    """Draw a batch in an engine of its own, timing every other step: a row of figures for the log of a tuning.

    step, plain_step: seconds. outside: seconds of a picture's prefill and pixels. plain: seconds of a picture by plain decoding, with
    both. tried, kept: children verified and accepted, [depth, rank].
    """
    engine, length = pipe.new_engine(settings), pipe.target.length
    timed, counts = TimedEngine(engine), AcceptanceByRank(length)
    prefill = timed.admit([prompt] * engine.batch, seeds)
    steps, plain_steps = list[float](), list[float]()
    while len(engine.done()) < engine.batch:
        # One step is counted and the next one is timed, as the kernels compute a step in one call only where nothing observes it.
        engine.observers.append(counts)
        timed.step()
        engine.observers.remove(counts)
        steps.append(sum(timed.step().values()))
        if len(steps) % EACH == 1:
            plain_steps.append(warm_step(plain)[0])
    began = now(engine)
    samples = [engine.collect(slot) for slot in range(engine.batch)]
    pipe.images(torch.stack([sample.codes for sample in samples]))
    pixels = (now(engine) - began) / engine.batch
    step, plain_step = trimmed(steps), trimmed(plain_steps)
    passes = sum(len(sample.accepted) for sample in samples) / engine.batch
    return {
        "outside": prefill + pixels,
        "plain": plain_step * (plain.prefill_steps + length - 1) + pixels,
        "codes_per_pass": length / passes,
        "step": step,
        "plain_step": plain_step,
        "nodes": engine.proposer.size - 1,
        "tried": counts.tried.tolist(),
        "kept": counts.kept.tolist(),
    }
