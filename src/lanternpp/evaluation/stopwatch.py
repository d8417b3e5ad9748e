"""Where the time of a step goes: drafting, the target's pass, verification."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from lanternpp.engine.decode import Engine

PHASES = ("draft", "pass", "verify", "rest")


class Stopwatch:
    """Times the parts of an engine's steps from outside; `rest` is what a whole run took beyond them.

    On a GPU it puts events on the stream, so that nothing waits for it: a part's time then includes what the
    device waits for the host.
    """

    def __init__(self, engine: Engine):
        self.cuda = engine.codes.device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []
        for owner, name, phase in (
            (engine.proposer, "propose", "draft"),
            (engine.proposer, "observe", "draft"),
            (engine.proposer, "begin", "draft"),
            (engine, "look", "pass"),
            (engine, "judge", "verify"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), phase))

    def take(self, seconds: float) -> dict[str, float]:
        """Seconds in each of PHASES since the last call, of a run that took `seconds` in all."""
        if self.cuda:
            torch.cuda.synchronize()
        spent = dict.fromkeys(PHASES, 0.0)
        for phase, began, ended in self._spans:
            spent[phase] += began.elapsed_time(ended) / 1000 if self.cuda else ended - began
        self._spans.clear()
        spent["rest"] = max(seconds - sum(spent.values()), 0.0)
        return spent

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _timed(self, part: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @wraps(part)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self._now()
            result = part(*args, **kwargs)
            self._spans.append((phase, began, self._now()))
            return result

        return timed
