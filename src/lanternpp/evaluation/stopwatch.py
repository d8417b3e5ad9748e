"""Where the time of a step goes: drafting, the target's pass, verification."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import Observer, Phase

PHASES = ("draft", "pass", "verify", "rest")


class Stopwatch(Observer):
    """Times the parts of an engine's steps; `rest` is what a whole run took beyond them.

    On a GPU it puts events on the stream, so that the host does not wait for the device: a part's time then includes
    the time in which the device waits for the host.
    """

    def __init__(self, engine: Engine):
        self.cuda = engine.codes.device.type == "cuda"
        self.observed = 0.0  # seconds of the last `rest` that other observers took
        self._marks: list[tuple[Phase, Any]] = []
        engine.observers.append(self)

    def entered(self, phase: Phase) -> None:
        """Record when a phase begins."""
        now: Any = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
        if self.cuda:
            now.record()
        self._marks.append((phase, now))

    def take(self, seconds: float) -> dict[str, float]:
        """Seconds in each of PHASES since the last call, of a run that took `seconds` in all."""
        if self.cuda:
            torch.cuda.synchronize()
        seconds_in = dict.fromkeys((*PHASES, "observe"), 0.0)
        for (phase, began), (_, ended) in pairwise(self._marks):
            seconds_in[phase] += began.elapsed_time(ended) / 1000 if self.cuda else ended - began
        self._marks.clear()
        self.observed = seconds_in.pop("observe")
        seconds_in["rest"] = max(seconds - sum(seconds_in[phase] for phase in PHASES[:-1]), 0.0)
        return seconds_in
