"""A batch that is kept full and timed: when a picture is finished, the next one takes its slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle

import torch
from torch import Tensor

from lanternpp.api.fit.store import machine_facts
from lanternpp.api.pipeline import Pipeline
from lanternpp.engine.batching import ContinuousBatch
from lanternpp.engine.decode import Engine
from lanternpp.engine.stopwatch import now
from lanternpp.evaluation.prompts import PROMPTS, read_prompts
from lanternpp.util.devices import device_name

Conditions = Sequence[str | None]


class BatchRunner(ContinuousBatch):
    """A batch that draws the same conditions over and over. finish: called with the codes [1, length] of each picture."""

    def __init__(
        self,
        engine: Engine,
        conditions: Conditions,
        seed: int,
        finish: Callable[[Tensor], object] | None = None,
    ):
        super().__init__(engine, zip(cycle(conditions), count(seed), strict=False))
        self.finish = finish
        self.begun: list[float] = []  # seconds of every prefill

    def entering(self) -> Iterator[None]:
        """Replace finished pictures by new ones, one at a time."""
        began = now(self.engine)
        for finished in self.refill():
            if finished is None:
                self.begun.append(now(self.engine) - began)
                yield
            elif self.finish:
                self.finish(finished[1].codes[None])
            began = now(self.engine)

    def timed_step(self) -> float:
        """Seconds of one step; prefills before it are not timed."""
        for _ in self.entering():
            pass
        began = now(self.engine)
        self.step()
        return now(self.engine) - began

    def turn(self) -> dict[str, float]:
        """Decide as many codes as the batch's pictures have: seconds with prefills and pixels, codes, passes.

        Passes are counted per sample, prefills among them.
        """
        codes, passes, goal = 0, 0, self.engine.batch * self.engine.target.length
        began = now(self.engine)
        while codes < goal:
            entered = sum(1 for _ in self.entering())
            before = sum(self.counts)
            self.step()
            codes += entered + sum(self.counts) - before
            passes += entered + self.engine.batch
        return {"seconds": now(self.engine) - began, "codes": codes, "passes": passes}


def usual_conditions(pipe: Pipeline) -> Conditions:
    """What to draw where no one says: the model's own list of prompts, some of its conditions, or the null condition."""
    if (pipe.folder / PROMPTS).is_file():
        return read_prompts(None, pipe.folder)
    known = pipe.target.conditions
    return known[:: max(1, len(known) // 25)] or [None]


def machine(pipe: Pipeline) -> dict[str, object]:
    """The device, processor, dtype and threads that seconds are measured with."""
    name = device_name(pipe.device)
    where = {"device": name, "processor": machine_facts()["processor"], "dtype": pipe.dtype}
    return where | {"threads": torch.get_num_threads()}
