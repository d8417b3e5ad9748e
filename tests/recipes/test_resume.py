"""Every training that is stopped and resumed ends as one that was not."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.stages import classifier, diffusion, eagle, kl, log, mixture, target, tokenizer, weights

# name: stage, the model whose parts it needs, those parts, its own part
CASES: dict[str, tuple[Any, str, tuple[str, ...], str]] = {
    "tokenizer": (partial(tokenizer, adversarial=True), "model", (), "tokenizer"),
    "target": (partial(target, corrupt=0.1), "model", ("tokenizer",), "target"),
    "classifier": (classifier, "model", ("tokenizer",), "classifier"),
    "tokenizer of latents": (kl, "latents", (), "tokenizer"),
    "mixture": (mixture, "latents", ("tokenizer",), "target"),
    "diffusion": (diffusion, "latents", ("tokenizer",), "target"),
    "drafter": (partial(eagle, loss="lk"), "ready", ("tokenizer", "target"), "drafter"),
    "drafter of mixtures": (eagle, "latents", ("tokenizer", "target"), "drafter"),
    "drafter of diffusion": (eagle, "diffusion", ("tokenizer", "target"), "drafter"),
}


@pytest.mark.parametrize(
    ("name", "stop"),
    [("tokenizer", 6), *((name, 3) for name in CASES)],  # 6: in the adversarial part
)
def test_a_stopped_and_resumed_run_repeats_the_unbroken_one(
    name: str, stop: int, data: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    stage, source, needs, part = CASES[name]
    fixture = {"latents": "latent_model", "diffusion": "diffusion_model"}.get(source, source)
    found = request.getfixturevalue(fixture)
    known = found[1] if isinstance(found, tuple) else found
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for place in (whole, parts):
        for each in needs:
            shutil.copytree(known / each, place / each)
    assert stage(data, whole) and not stage(data, parts, stop=stop)
    assert not (parts / part / "config.json").exists()
    assert stage(data, parts)
    assert log(parts, part) == log(whole, part)
    one, two = weights(whole, part), weights(parts, part)
    assert one.keys() == two.keys() and all(torch.equal(tensor, two[key]) for key, tensor in one.items())
