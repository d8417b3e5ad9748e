"""The stages of recipes/nature and a drafter's training at toy size: a few steps into a model's folder; False where stopped."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import classifier as classifiers
import target as targets
import tokenizer as tokenizers
from classifier import ClassifierSettings
from lanternpp.evaluation.classifier import ClassifierConfig
from lanternpp.nn import checkpoints
from lanternpp.training import drafter, loop
from lanternpp.training.eagle import EagleTask
from lanternpp.training.loop import State, Task
from lanternpp.training.options import DrafterSettings, TrainingData, TrainingOptions
from target import Shape
from tokenizer import TokenizerSettings
from words import TargetSettings

STAGES = {  # by the pixels of an image's side per code
    4: {"channels": (16, 32), "encoder_blocks": (1, 1), "decoder_blocks": (1, 1)},
    8: {"channels": (16, 16, 32), "encoder_blocks": (1,) * 3, "decoder_blocks": (1,) * 3},
}
SHAPE = Shape(32, 2, 2, 48)
SMALLER_CLASSIFIER = partial(ClassifierConfig, stem=16, channels=(32, 48), blocks=(1, 1))


def options(steps: int, **more: Any) -> TrainingOptions:
    """Two checks are made."""
    return TrainingOptions(steps, **{"checks": 2, **more})


@contextmanager
def interrupted_at(step: int | None) -> Iterator[None]:
    """Every step is logged; Ctrl-C comes in a step, if one is given."""
    update = loop.update

    def interrupted(task: Task, state: State, progress: float) -> None:
        update(task, state, progress)
        if state.step == step:
            signal.raise_signal(signal.SIGINT)

    with patch.object(loop, "update", interrupted), patch.object(loop, "LOG_STEPS", 1):
        yield


def stage(
    module: Any, hparams: type, data: Path, model: Path, training: TrainingOptions, **given: Any
) -> bool:
    """Run a stage; options that are fields of its hyperparameters are given as such."""
    settings = hparams(**{name: given.pop(name) for name in vars(hparams()) if name in given})
    return module.main(data=data, model=model, settings=settings, training=training, **given)


def tokenizer(data: Path, model: Path, steps: int = 8, stop: int | None = None, **given: Any) -> bool:
    """A tokenizer of 32 px; by default without a discriminator and a perceptual loss."""
    usual = {"batch_size": 4, "adversarial": False, "perceptual": 0.0, "size": 32}
    shape = {} if given.keys() & {"codes_of", "kind"} else {"down": 4, "codes": 64}
    with patch.dict(tokenizers.STAGES, STAGES), interrupted_at(stop):
        return stage(tokenizers, TokenizerSettings, data, model, options(steps), **usual | shape | given)


kl = partial(tokenizer, kind="kl", channels=4, lr=3e-3, warmup=2)


def target(
    data: Path, model: Path, steps: int = 4, stop: int | None = None, compiled: bool = False, **given: Any
) -> bool:
    """A target, by default over codes."""
    usual = {"batch_size": 4, "warmup": 2, "crops": 1, "shape": SHAPE}
    with interrupted_at(stop):
        training = options(steps, compile=compiled)
        return stage(targets, TargetSettings, data, model, training, **usual | given)


mixture = partial(target, head="mixture", shape=replace(SHAPE, components=3))
DENOISER = replace(SHAPE, denoising_steps=3, denoiser_width=16, denoiser_blocks=1)
diffusion = partial(target, head="diffusion", shape=DENOISER)


def classifier(data: Path, model: Path, steps: int = 8, stop: int | None = None, **given: Any) -> bool:
    """A classifier, stored in 8 bits."""
    usual, training = {"batch_size": 6, "redrawn": 5}, options(steps, store="int8")
    with patch.object(classifiers, "ClassifierConfig", SMALLER_CLASSIFIER), interrupted_at(stop):
        return stage(classifiers, ClassifierSettings, data, model, training, **usual | given)


def eagle(data: Path, model: Path, steps: int = 4, stop: int | None = None, **more: Any) -> bool:
    """An EAGLE drafter; more: loss, cache and compiled."""
    hparams = DrafterSettings(batch_size=4, warmup=2, loss=more.get("loss")).of("eagle")
    how = options(steps, compile=more.get("compiled", False))
    source = TrainingData(data, crops=1, cache_features=more.get("cache", False))
    with interrupted_at(stop):
        return bool(drafter.train(model, EagleTask, hparams, source, model / "drafter", how))


def provenance(model: Path, part: str) -> Any:
    """A part's provenance."""
    return json.loads((model / part / "provenance.json").read_text())


def log(model: Path, part: str) -> list[dict[str, Any]]:
    """The rows of a part's log, without seconds."""
    rows = [json.loads(line) for line in (model / part / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def weights(model: Path, part: str) -> dict[str, torch.Tensor]:
    """The weights of a part on disk."""
    return checkpoints.load(model / part)[1]
