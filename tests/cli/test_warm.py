"""`lanternpp warm` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.latents import write_diffusion

from lanternpp.api.pipeline import Pipeline
from lanternpp.engine import compiled


def test_without_anything_to_compile_it_says_so_and_a_batch_size_is_refused(
    run, model, tmp_path: Path, monkeypatch
) -> None:
    outcome = run("models", "warm", "--model", model, "--device", "cpu")
    said = "nothing to compile here: a CPU compiles steps with --compile alone\n"
    assert (outcome.code, outcome.out) == (0, said)
    run("models", "warm", "--model", model, "--batch-size", 2).refused("--batch-sizes")
    monkeypatch.setattr(Pipeline, "warm", lambda *_: ["verify"])
    outcome = run("models", "warm", "--model", model, "--device", "cpu", "--compile")
    assert outcome.code == 0 and "drawn as it is" in outcome.err and outcome.out.startswith("ready after")
    latents = ("--model", write_diffusion(tmp_path), "--compile")
    for verb in (("models", "warm"), ("generate", "a red tulip")):
        run(*verb, *latents).refused("draws latents, whose steps are never compiled; leave --compile out")


def test_steps_are_compiled_at_every_size_for_the_method_and_plain_decoding(
    run, model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiled.FOLDER_VARIABLE, str(tmp_path / "made"))
    # What is traced is tested with the engine.
    monkeypatch.setattr(torch, "compile", lambda part, **_: part)
    args = ["--model", model, "--device", "cpu", "--compile", "--method", "parallel", "--tree", "chain-2"]
    outcome = run("models", "warm", *args, "--batch-sizes", "1,2")
    assert outcome.code == 0 and "not compiled" not in outcome.err
    steps = [line for line in outcome.out.splitlines() if line.startswith("steps of ")]
    kept = f"in {tmp_path / 'made'}"
    assert steps == [f"steps of {m}, {n} at a time: {kept}" for n in (1, 2) for m in ("ar", "parallel")]
    marks = [json.loads(path.read_text()) for path in (tmp_path / "made").glob("warm-*.json")]
    found = sorted((mark["method"], mark["batch_size"], mark["compile"]) for mark in marks)
    assert found == [(method, n, True) for method in ("ar", "parallel") for n in (1, 2)]
