"""On a CUDA GPU: the codes are those of a CPU, a step does not wait for the host, and a profile counts its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lanternpp.api.options import METHODS
from lanternpp.api.pipeline import Pipeline
from lanternpp.engine import compiled
from lanternpp.evaluation import report
from lanternpp.evaluation.profile import profile_race
from lanternpp.evaluation.race import Race, parse_methods

pytestmark = pytest.mark.gpu
PROMPTS = ["a red tulip", "a tulip"]


@pytest.fixture(scope="module")
def pipe(model: Path) -> Pipeline:
    return Pipeline.from_pretrained(model, device="cuda")


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    """Any wait of the host for the device is an error once `torch.cuda.set_sync_debug_mode` says so."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", METHODS)
def test_codes_in_float64_are_those_of_a_cpu(model, method):
    drawn = []
    for device in ("cpu", "cuda"):
        pipe = Pipeline.from_pretrained(model, device=device, dtype="float64")
        drawn.append(pipe(PROMPTS, seed=3, method=method, batch_size=2).codes)
    assert torch.equal(*drawn)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_does_not_wait_for_the_device(pipe, no_synchronisation, method):
    made = pipe.new_engine(pipe.settings(method, batch_size=2))
    for slot, prompt in enumerate(PROMPTS):
        made.admit(slot, prompt, slot)
    made.step()  # makes what is made once
    torch.cuda.set_sync_debug_mode("error")
    made.step()
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", ["ar", "parallel", "lantern++"])
def test_compiled_steps_are_cuda_graphs_and_draw_the_same_codes(model, method, tmp_path, monkeypatch):
    monkeypatch.setenv(compiled.FOLDER, str(tmp_path))
    pipe = Pipeline.from_pretrained(model, device="cuda", dtype="float64")
    drawn = [pipe(PROMPTS, seed=3, method=method, batch_size=2, compile=flag).codes for flag in (False, True)]
    assert torch.equal(*drawn)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert pipe.warm(pipe.settings(method)) == [] and pipe.is_warm(pipe.settings(method))


def test_a_profile_names_the_operations_whose_kernels_take_longest(pipe, tmp_path):
    race = Race(pipe, parse_methods("ar, eagle tree=chain-2"), PROMPTS, 1, 0, {}, measure_tv=False)
    table = report.rows(race.run(tmp_path), race.describe(), {})
    for row in profile_race(race, table, tmp_path):
        assert "aten::" in row[-1] and "pass" not in row[-1]
    trace = (tmp_path / "profile-ar.json").read_text()
    assert '"cat": "kernel"' in trace and '"name": "verify"' in trace
