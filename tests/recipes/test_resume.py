"""Every training that is stopped and resumed ends as one that was not."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.stages import classifier, diffusion, eagle, kl, log, mixture, target, tokenizer, weights

# name: stage, its part, the fixture of a model with the parts that it needs, and those
CASES: dict[str, tuple[Any, str, str, tuple[str, ...]]] = {
    "tokenizer": (partial(tokenizer, adversarial=True), "tokenizer", "model", ()),
    "target": (partial(target, corrupt=0.1), "target", "model", ("tokenizer",)),
    "classifier": (classifier, "classifier", "model", ("tokenizer",)),
    "tokenizer of latents": (kl, "tokenizer", "latents", ()),
    "mixture": (mixture, "target", "latents", ("tokenizer",)),
    "diffusion": (diffusion, "target", "latents", ("tokenizer",)),
    "drafter": (partial(eagle, loss="lk"), "drafter", "ready", ("tokenizer", "target")),
    "drafter of mixtures": (eagle, "drafter", "latents", ("tokenizer", "target")),
    "drafter of diffusion": (eagle, "drafter", "diffused", ("tokenizer", "target")),
}


@pytest.mark.parametrize(
    ("name", "stop"),
    [("tokenizer", 6), *((name, 3) for name in CASES)],  # 6: in the adversarial part
)
def test_a_stopped_and_resumed_run_repeats_the_uninterrupted_one(
    name: str, stop: int, data: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    stage, part, fixture, needs = CASES[name]
    known = request.getfixturevalue(fixture)
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    for place in (uninterrupted, resumed):
        for each in needs:
            shutil.copytree(known / each, place / each)
    assert stage(data, uninterrupted) and not stage(data, resumed, stop=stop)
    assert not (resumed / part / "config.json").exists()
    assert stage(data, resumed)
    assert log(resumed, part) == log(uninterrupted, part)
    one, two = weights(uninterrupted, part), weights(resumed, part)
    assert one.keys() == two.keys() and all(torch.equal(tensor, two[key]) for key, tensor in one.items())
