"""On a CUDA GPU: the codes are those of a CPU, a step does not wait for the host, a profile counts its kernels, and a
drafter is trained."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
import torch
from helpers.toys import HostReader

from lanternpp.api.options import METHODS
from lanternpp.api.pipeline import Pipeline
from lanternpp.engine import compiled
from lanternpp.engine.compiled import GraphedParts
from lanternpp.evaluation import report
from lanternpp.evaluation.profile import profile_race
from lanternpp.evaluation.race import Race, parse_methods
from lanternpp.training.loop import run
from lanternpp.training.options import DrafterSettings, TrainingData, TrainingOptions
from lanternpp.training.rollouts import RolloutTask
from lanternpp.training.teacher import Teacher

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
    made.step()  # is recorded
    made.step()
    torch.cuda.set_sync_debug_mode("default")
    assert isinstance(made.run, GraphedParts) and made.run.failed == []


def test_a_part_that_reads_on_the_host_is_not_recorded(pipe):
    settings = pipe.settings("lantern-static", accept=HostReader(), batch_size=2)
    plain, recorded = (pipe.new_engine(settings) for _ in range(2))
    plain.run = operator.call
    for each in (plain, recorded):
        for slot, prompt in enumerate(PROMPTS):
            each.admit(slot, prompt, slot)
    stream = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="verify of a step runs without a graph"):
        for _ in range(4):
            plain.step()
            recorded.step()
    assert recorded.run.failed == ["_verify"] and torch.cuda.current_stream() == stream
    assert torch.equal(plain.codes, recorded.codes)


@pytest.mark.parametrize("method", ["ar", "parallel", "lantern++"])
def test_compiled_steps_are_cuda_graphs_and_draw_the_same_codes(model, method, tmp_path, monkeypatch):
    monkeypatch.setenv(compiled.FOLDER_VARIABLE, str(tmp_path))
    pipe = Pipeline.from_pretrained(model, device="cuda", dtype="float64")
    drawn = [pipe(PROMPTS, seed=3, method=method, batch_size=2, compile=flag).codes for flag in (False, True)]
    assert torch.equal(*drawn)
    assert pipe.warm(pipe.settings(method)) == [] and pipe.is_warm(pipe.settings(method))


def test_a_profile_names_the_operations_whose_kernels_take_longest(pipe, tmp_path):
    race = Race(pipe, parse_methods("ar, eagle tree=chain-2"), PROMPTS, 1, 0, {}, measure_tv=False)
    table = report.rows(race.run(tmp_path), race.describe(), {})
    for row in profile_race(race, table, tmp_path):
        assert "aten::" in row[-1] and "pass" not in row[-1]
    trace = (tmp_path / "profile-ar.json").read_text()
    assert '"cat": "kernel"' in trace and '"name": "verify"' in trace


@pytest.mark.parametrize("compiled", [False, True])
def test_a_drafter_learns_from_runs_that_stay_on_the_gpu(model, tmp_path, compiled):
    folder = copytree(model, tmp_path / "tiny")
    prompts = tmp_path / "prompts"
    prompts.write_text("a red tulip\na tulip\n")
    options = TrainingOptions(steps=2, device="cuda", checks=1, compile=compiled)
    teacher = Teacher(folder, tmp_path / "next", "cuda", None, draws=True)
    source = TrainingData(own=True, prompts=prompts, rollouts=4, sample_batch=2, drafter=folder / "parallel")
    settings = replace(DrafterSettings(batch_size=2, warmup=1).of("parallel"), cfg=teacher.cfg)
    settings, runs = RolloutTask.material(settings, teacher, source)
    codes = runs.build()
    assert all(each.features.is_cuda for each in codes.train.runs)
    assert run(RolloutTask(settings, teacher, codes, source), tmp_path / "next", options)
    assert (tmp_path / "next" / "provenance.json").is_file()
