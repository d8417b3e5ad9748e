"""A timed engine that is put back to the same place of its pictures."""

from __future__ import annotations

import pytest
import torch
from helpers.models import write_model

from lanternpp.api.pipeline import Pipeline
from lanternpp.engine.stopwatch import TimedEngine


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = write_model(tmp_path_factory.mktemp("stopwatch") / "tiny")
    return Pipeline.from_pretrained(str(folder), dtype="bfloat16")


@pytest.mark.parametrize("method", ["ar", "eagle", "parallel", "independent", "jacobi-coupled"])
def test_a_timed_engine_moves_its_own_cache_and_the_drafters_together(pipe, method):
    settings = pipe.settings(method, batch_size=2)
    timed = TimedEngine(pipe.new_engine(settings))
    timed.admit(["a red tulip"] * 2, range(2))
    made, at = timed.engine, []
    for _ in range(3):
        timed.move_to(torch.full_like(made.count, 8))
        own = getattr(made.proposer, "cache", None)
        waiting = getattr(made.proposer, "waiting", 0)  # codes that the parallel drafter has not run yet
        at.append((made.count.tolist(), made.proposer.count.tolist(), made.cache.used.tolist()))
        at[-1] += () if own is None else ((own.used[:2] + waiting).tolist(),)
        timed.step()
        assert (made.count > 8).all()
    assert at[0] == at[1] == at[2] and at[0][0] == at[0][1] == [8, 8]
