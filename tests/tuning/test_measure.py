"""How a candidate of a tuning is timed."""

from __future__ import annotations

import pytest

from lanternpp.api.pipeline import Pipeline
from lanternpp.engine.observers import AcceptanceByRank, TimedEngine
from lanternpp.tuning.measure import PlainEngine, draw


def test_steps_that_are_counted_are_not_timed(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels have no whole step where it is observed, so that drawing is faster than a counted step."""
    step = TimedEngine.step

    def priced(timed: TimedEngine) -> dict[str, float]:
        step(timed)
        counted = any(isinstance(observer, AcceptanceByRank) for observer in timed.engine.observers)
        return {"pass": 9.0 if counted else 1.0}

    monkeypatch.setattr(TimedEngine, "step", priced)
    plain = PlainEngine(pipe, pipe.settings("ar", batch_size=1), "a red tulip")
    row = draw(pipe, pipe.settings("parallel", tree="chain-2", batch_size=1), plain, "a red tulip", [0])
    assert row["step"] == row["plain_step"] == 1.0 and row["tried"][0][0] > 0
