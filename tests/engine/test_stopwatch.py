"""A timed engine that is put back to the same place of its pictures."""

from __future__ import annotations

import pytest
from helpers.models import write_model

from lanternpp.api.pipeline import Pipeline
from lanternpp.engine.stopwatch import TimedEngine


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = write_model(tmp_path_factory.mktemp("stopwatch") / "tiny")
    return Pipeline.from_pretrained(str(folder), dtype="bfloat16")


@pytest.mark.parametrize("method", ["ar", "eagle", "parallel", "independent", "jacobi-coupled"])
def test_a_timed_engine_moves_its_own_cache_and_the_drafters_together(pipe, method):
    timed = TimedEngine(pipe.new_engine(pipe.settings(method, batch_size=2)))
    timed.admit(["a red tulip"] * 2, range(2))
    made = timed.engine
    half, caches = made.target.length // 2, [made.cache, getattr(made.proposer, "cache", made.cache)]
    for _ in range(3):
        timed.move_midway()
        assert made.count.tolist() == made.proposer.count.tolist() == [half, half]
        assert all((cache.used == made.target.slots + half).all() for cache in caches)
        timed.step()
        assert (made.count > half).all()
