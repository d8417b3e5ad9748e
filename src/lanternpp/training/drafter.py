"""What the trainings of drafters share: settings, material, a step, export."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.drafters.base import mark
from lanternpp.models.base import Target
from lanternpp.training.codes import (
    Codes,
    FolderCodes,
    OwnCodes,
    PictureCodes,
    Sampler,
    choose_prompts,
)
from lanternpp.training.features import CaptionPrompts
from lanternpp.training.loop import autocast, run, team
from lanternpp.training.options import DrafterSettings, TrainingData, TrainingOptions
from lanternpp.training.pictures import read_rows
from lanternpp.training.state import Task, averaged, check_resumable
from lanternpp.training.teacher import Teacher


def material_of(source: TrainingData, teacher: Teacher, seed: int) -> PictureCodes | OwnCodes | FolderCodes:
    """The codes that a drafter learns from, not built yet."""
    if source.codes is not None:
        return FolderCodes(source.codes, teacher.target)
    if source.own:
        prompts = choose_prompts(teacher, source.prompts, source.data)
        return OwnCodes(teacher, prompts, source.samples, source.sample_batch, seed)
    assert source.data is not None
    return PictureCodes(source.data, teacher.target.reader(), teacher.store, source.crops, source.limit)


class DrafterTask(Task):
    """A drafter for a frozen target, on its codes. A class for each kind builds the network and has the loss."""

    hparams: Any  # `DrafterSettings.of` a kind
    model: Any
    average: Any

    def __init__(self, settings: DrafterSettings, teacher: Teacher, codes: Codes):
        torch.manual_seed(settings.seed)
        self.hparams, self.teacher, self.codes, self.device = settings, teacher, codes, teacher.device
        self.data, self.decay, self.warmup = codes.data, settings.decay, settings.warmup
        self.target = teacher.trainable()
        drafter = self.make()
        self.config: Any = drafter.config
        known = {"data": codes.data["codes"], "target": teacher.origin}
        self.settings = {**self.config.flat(), **asdict(settings), **known}
        self.model = drafter.float().to(self.device).train()
        self.average = averaged(self.model)
        self.optimizers = self.make_optimizers()
        self.sampler = Sampler(
            len(codes.train), codes.train.codes.shape[1], settings.batch_size, settings.seed
        )
        self.train, self.val = (
            CaptionPrompts(self.target, codes.train),
            CaptionPrompts(self.target, codes.val),
        )

    @classmethod
    def check(cls, settings: DrafterSettings, target: Target) -> None:
        """InputError where the settings do not suit the target, before anything is drawn."""

    @abstractmethod
    def make(self) -> Any:
        """The network with first weights; it has a config."""

    @abstractmethod
    def make_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers of `model`."""

    @abstractmethod
    def losses(self, index: Tensor, variant: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Of pictures index [B] in variants [B]: `loss`, which a step minimises, and what the log has besides.

        A loss `confidence` is minimised too; its gradient is not clipped.
        """

    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        """One update."""
        with autocast(self.device):
            figures = self.losses(*self.sampler(step))
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        (figures["loss"] + figures.get("confidence", 0)).backward()
        team().average_gradients(self.model)
        named = self.model.named_parameters()
        nn.utils.clip_grad_norm_([p for name, p in named if not name.startswith("confidence")], 0.5)
        for optimizer in self.optimizers.values():
            optimizer.step()
        return {name: value for name, value in figures.items() if value.dim() == 0}

    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The averaged drafter."""
        config = {"kind": self.kind, **self.config.flat(), "target": mark(self.target)}
        return config, self.average.state_dict()

    @property
    @abstractmethod
    def kind(self) -> str:
        """The kind of drafter, as its config names it."""


def train(
    model: str | Path,
    task: type[DrafterTask],
    settings: DrafterSettings,
    source: TrainingData,
    options: TrainingOptions,
    **more: Any,
) -> bool:
    """Train a drafter of `model` in the folder of `options`; False if interrupted. more: further arguments of the task.

    settings: `DrafterSettings.of` the task's kind. InputError where there is nothing to learn from, or the folder was
    trained with other settings: before anything is drawn or encoded.
    """
    source.check()
    options.check()
    if source.data is not None:
        for split in ("train", "val"):
            read_rows(source.data, split, source.limit)
    early = {name: value for name, value in asdict(settings).items() if name != "cfg"}
    check_resumable(options, early)
    teacher = Teacher(model, options, settings.cfg, source.own)
    settings = replace(settings, cfg=teacher.cfg)
    task.check(settings, teacher.target)
    material = material_of(source, teacher, settings.seed)
    check_resumable(options, {"cfg": teacher.cfg, "target": teacher.origin, "data": material.key})
    return run(task(settings, teacher, material.build(), **more), options)
