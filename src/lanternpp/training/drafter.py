"""The base class of drafters' trainings: settings, material, a step, export."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.drafters.base import mark
from lanternpp.engine.sampling import Guidance
from lanternpp.models.base import Target
from lanternpp.training.codes import Codes, OwnCodes, PictureCodes, Sampler, choose_prompts, folder_codes
from lanternpp.training.features import CaptionPrompts
from lanternpp.training.loop import run, team
from lanternpp.training.options import DrafterSettings, TrainingData, TrainingOptions
from lanternpp.training.pictures import read_rows
from lanternpp.training.state import Task, averaged, check_resumable
from lanternpp.training.teacher import Teacher


class DrafterTask(Task):
    """A drafter for a frozen target, on its codes. A class for each kind builds the network and has the loss."""

    hparams: Any  # `DrafterSettings.of` a kind
    model: Any
    average: Any
    kind: str  # of drafter, as its config names it
    found: tuple[str, ...] = ("cfg",)  # settings that follow from the target or from the material

    def __init__(self, settings: Any, teacher: Teacher, codes: Codes, source: TrainingData | None = None):
        torch.manual_seed(settings.seed)
        self.guidance = Guidance(settings.cfg)
        self.hparams, self.teacher, self.codes, self.device = settings, teacher, codes, teacher.device
        self.data, self.decay, self.warmup = codes.data, settings.decay, settings.warmup
        self.target = teacher.trainable()
        drafter = self.make()
        self.config: Any = drafter.config
        known = {"data": codes.key, "target": teacher.origin}
        self.settings = {**self.config.flat(), **asdict(settings), **known}
        self.model = drafter.float().to(self.device).train()
        self.average = averaged(self.model)
        self.optimizers = self.make_optimizers()
        self.training_loss: Callable[..., Any] = self.loss
        self.sampler = Sampler(
            len(codes.train), codes.train.codes.shape[1], settings.batch_size, settings.seed
        )
        self.train, self.val = (CaptionPrompts(self.target, split) for split in (codes.train, codes.val))

    @classmethod
    def check(cls, settings: DrafterSettings, target: Target, source: TrainingData) -> None:
        """InputError where the settings do not suit the target, before anything is drawn."""

    @classmethod
    def material(cls, settings: DrafterSettings, teacher: Teacher, source: TrainingData) -> tuple[Any, Any]:
        """The settings, complete, and the material that builds the codes to learn from."""
        if source.codes is not None:
            return settings, folder_codes(source.codes, teacher.target)
        if source.own:
            prompts = choose_prompts(teacher, source.prompts, source.data)
            return settings, OwnCodes(teacher, prompts, source.samples, source.sample_batch, settings.seed)
        assert source.data is not None
        reader = teacher.target.reader()
        return settings, PictureCodes(source.data, reader, teacher.store, source.crops, source.limit)

    @abstractmethod
    def make(self) -> Any:
        """The network with first weights; it has a config."""

    @abstractmethod
    def make_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers of `model`."""

    @abstractmethod
    def losses(self, index: Tensor, variant: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Of pictures index [B] in variants [B], by `training_loss`: `loss`, which a step minimises, and more figures for the log.

        A loss `confidence` is minimised too; its gradient is not clipped.
        """

    @abstractmethod
    def loss(self, *inputs: Any, **more: Any) -> Any:
        """The loss, as `training_loss` computes it too, compiled or not."""

    def speed_up(self) -> None:
        """Compile networks and loss as one graph of one shape. Validations have other shapes and are not compiled."""
        self.training_loss = torch.compile(self.loss, fullgraph=True, dynamic=False)

    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        """One update."""
        index, variant, generator = self.sampler(step)
        with team().autocast(self.device):
            figures = self.losses(team().share(index), team().share(variant), generator)
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


def train(
    model: str | Path,
    task: type[DrafterTask],
    settings: DrafterSettings,
    source: TrainingData,
    options: TrainingOptions,
) -> tuple[str, ...]:
    """Train a drafter of `model` in the folder of `options`. Returns the prompts of its validation; none if interrupted.

    settings: `DrafterSettings.of` the task's kind. InputError where there is nothing to learn from, or the folder was
    trained with other settings: before anything is drawn or encoded.
    """
    source.check(folder=options.folder)
    options.check()
    if source.data is not None:
        for split in ("train", "val"):
            read_rows(source.data, split, source.limit)
    early = {name: value for name, value in asdict(settings).items() if name not in task.found}
    check_resumable(options, early)
    teacher = Teacher(model, options, settings.cfg, source.own or source.rollouts is not None)
    settings = replace(settings, cfg=teacher.cfg)
    task.check(settings, teacher.target, source)
    settings, material = task.material(settings, teacher, source)
    known = {"target": teacher.origin, "data": material.key}
    check_resumable(options, {**{name: getattr(settings, name) for name in task.found}, **known})
    made = task(settings, teacher, material.build(), source)
    prompts = dict.fromkeys(text for text in made.val.texts if text is not None)
    return tuple(prompts) if run(made, options) else ()
