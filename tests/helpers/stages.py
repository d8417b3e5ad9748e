"""The stages of recipes/nature and a drafter's training at toy size: a few steps into a model's folder; False where stopped."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

import classifier as classifiers
import target as targets
import tokenizer as tokenizers
from lanternpp.models.vq.autoencoder import KLConfig, VQConfig
from lanternpp.nn import checkpoints
from lanternpp.training import drafter
from lanternpp.training.eagle import EagleTask
from lanternpp.training.options import DrafterSettings, TrainingData, TrainingOptions
from target import Head, Shape

VQ_SHAPE = VQConfig(
    size=32, codes=64, channels=(16, 32), encoder_blocks=(1, 1), decoder_blocks=(1, 1), thin=16
)
KL_SHAPE = KLConfig(32, 4, (16, 16, 32), (1,) * 3, (1,) * 3)
OWN, SHAPE = Head(), Shape(32, 2, 2, 48)
CLASSIFIER_SHAPE = {"stem": 16, "channels": (32, 48), "blocks": (1, 1)}


def options(folder: Path, steps: int, stop: int | None = None, **more: Any) -> TrainingOptions:
    """Every step is logged, and two checks are made."""
    return TrainingOptions(folder, steps, stop_after=stop, **{"log_steps": 1, "checks": 2, **more})


def tokenizer(
    data: Path,
    model: Path,
    steps: int = 8,
    stop: int | None = None,
    config: Any = VQ_SHAPE,
    codes_of: Path | None = None,
    weights_of: Path | None = None,
    classifier_of: Path | None = None,
    **settings: Any,
) -> bool:
    """A tokenizer; by default without a discriminator and a perceptual loss."""
    small = {"batch_size": 4, "adversarial": False, "perceptual": 0.0, **settings}
    where = options(model / "tokenizer", steps, stop)
    others = {"codes_of": codes_of, "weights_of": weights_of, "classifier_of": classifier_of}
    return tokenizers.train(data, config, tokenizers.TokenizerSettings(**small), where, **others)


kl = partial(tokenizer, config=KL_SHAPE, lr=3e-3, warmup=2)


def target(
    data: Path,
    model: Path,
    steps: int = 4,
    stop: int | None = None,
    compiled: bool = False,
    checks: int = 2,
    weights_of: Path | None = None,
    head: str = "softmax",
    own: Head = OWN,
    shape: Shape = SHAPE,
    **settings: Any,
) -> bool:
    """A target, by default over codes."""
    hparams = targets.TargetSettings(**{"batch_size": 4, "warmup": 2, **settings})
    where = options(model / "target", steps, stop, compile=compiled, checks=checks)
    return targets.train(
        data, model, shape, hparams, where, crops=1, weights_of=weights_of, head=head, own=own
    )


mixture = partial(target, head="mixture", own=Head(components=3))
diffusion = partial(target, head="diffusion", own=Head(None, 3, 16, 1))


def eagle(data: Path, model: Path, steps: int = 4, stop: int | None = None, **more: Any) -> bool:
    """An EAGLE drafter; more: loss, cache and compiled."""
    hparams = DrafterSettings(batch_size=4, warmup=2, loss=more.get("loss")).of("eagle")
    where = options(model / "drafter", steps, stop, compile=more.get("compiled", False))
    source = TrainingData(data, crops=1, cache_features=more.get("cache", False))
    return drafter.train(model, EagleTask, hparams, source, where)


def classifier(data: Path, model: Path, steps: int = 8, stop: int | None = None, **settings: Any) -> bool:
    """A classifier, stored in 8 bits."""
    hparams = classifiers.ClassifierSettings(**{"batch_size": 6, "redrawn": 5, **settings})
    where = options(model / "classifier", steps, stop, store="int8")
    return classifiers.train(data, model, CLASSIFIER_SHAPE, hparams, where)


def facts(model: Path, part: str) -> Any:
    """A part's provenance."""
    return json.loads((model / part / "provenance.json").read_text())


def log(model: Path, part: str) -> list[dict[str, Any]]:
    """The rows of a part's log, without seconds."""
    rows = [json.loads(line) for line in (model / part / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def weights(model: Path, part: str) -> dict[str, torch.Tensor]:
    """The weights of a part as they lie on disk."""
    return checkpoints.load(model / part)[1]
