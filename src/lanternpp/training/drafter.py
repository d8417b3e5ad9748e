"""The base class of drafters' trainings: material, inputs, a step, export; and the acceptance rates that a drafter is stored with."""

from __future__ import annotations

import json
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.api.options import Settings
from lanternpp.api.pipeline import Pipeline
from lanternpp.api.rates import FILE, Counts, strength
from lanternpp.drafters.base import mark
from lanternpp.drafters.parallel import branch_mask
from lanternpp.engine.batching import ContinuousBatch
from lanternpp.engine.observers import AcceptanceByRank
from lanternpp.engine.sampling import Guidance
from lanternpp.errors import InputError
from lanternpp.models.base import PromptWarning, Target
from lanternpp.training.codes import Codes, Sampler, Split, folder_codes
from lanternpp.training.loop import Task, averaged, descend, run, saved_state
from lanternpp.training.options import DrafterSettings, Kind, TrainingData, TrainingOptions
from lanternpp.training.pictures import PictureCodes, read_rows
from lanternpp.training.teacher import NONE_FOLLOWED, OwnCodes, Teacher, choose_prompts, followed, warping
from lanternpp.training.team import autocast, team
from lanternpp.util.files import write_text

MAX_DEPTH = 16  # levels of the drafts whose acceptance rates are stored
PASSES, BATCH_SIZE = 500, 2  # passes in which acceptance is counted, and pictures drawn at once
LAMBDAS = (1.5, 2.0, 3.0)  # strengths of LANTERN++ whose rates are stored


class CaptionPrompts:
    """The prompts of a split, padded on the left to one length; a caption that the target cannot follow becomes the null prompt."""

    def __init__(self, target: Target, split: Split):
        self.target, self.split = target, split
        sizes: dict[str | None, tuple[int, bool]] = {}  # slots of each prompt, and whether some are padding
        target.cache_prompts(len(set(split.texts)))
        for text in (None, *dict.fromkeys(split.texts)):
            with suppress(InputError):
                embeds, start = self._prompt([text], 2)
                sizes[text] = embeds.shape[1], bool(start.any())
        target.release_encoder()
        if not sizes.keys() - {None}:
            raise InputError("the target can follow none of the captions: was it trained on other data?")
        self.slots = max(slots for slots, _ in sizes.values())
        self.padded = any(padded or slots < self.slots for slots, padded in sizes.values())
        self.texts = [text if text in sizes else None for text in split.texts]

    def __call__(
        self, index: Tensor, branches: int, drop: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the prompts of pictures index [B], [branches * B, T, D], and the slots where they begin, [branches * B].

        The slots are None where no prompt is padded. A second branch is unconditional, and so is a single branch where drop [B].
        """
        texts = [self.texts[i] for i in index.tolist()]
        embeds, start = self._prompt(texts, branches if drop is None else 2)
        if drop is not None:
            embeds, null_embeds = embeds.chunk(2)
            start, null_start = start.chunk(2)
            drop = drop.to(embeds.device)
            embeds = torch.where(drop[:, None, None], null_embeds, embeds)
            start = torch.where(drop, null_start, start)
        if padding := self.slots - embeds.shape[1]:
            embeds, start = F.pad(embeds, (0, 0, padding, 0)), start + padding
        return embeds, start if self.padded else None

    def _prompt(self, texts: list[str | None], branches: int) -> tuple[Tensor, Tensor]:
        with warnings.catch_warnings(action="ignore", category=PromptWarning), torch.no_grad():
            prompt = self.target.prompt(texts, branches)
        return prompt.embeds, prompt.start


def slot_inputs(target: Target, prompts: Tensor, codes: Tensor) -> Tensor:
    """Return the target's inputs, prompts [R, T, D] and all codes [R, length] except the last: [R, T + length - 1, D]."""
    return torch.cat((prompts, target.embed(codes[:, :-1]).to(prompts.dtype)), 1)


def drafter_inputs(
    target: Target,
    prompts: Tensor,
    codes: Tensor,
    start: Tensor | None = None,
    aux_layers: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Return next_inputs [R, S - 1, D], the input after each slot, and the target's features [R, S, D], for S = T + length - 1 slots.

    prompts [R, T, D] begin at start [R]; codes [R, length]. A drafter predicts features[:, t + 1] from next_inputs[:, t] and
    features[:, t]. With aux_layers features are [R, S, (1 + aux) D], as `Decoder.forward` returns them.
    """
    inputs = slot_inputs(target, prompts, codes)
    slot = torch.arange(inputs.shape[1], device=inputs.device)[None]
    mask = None if start is None else branch_mask(slot, slot, start)
    return inputs[:, 1:], target.decoder.forward_sequence(inputs, mask=mask, aux_layers=aux_layers)


class DrafterTask(Task):
    """The training of a drafter for a frozen target, on its codes. A subclass for each kind builds the network and has the loss."""

    average: Any  # a `Drafter`

    def __init__(self, settings: Any, teacher: Teacher, codes: Codes, source: TrainingData | None = None):
        torch.manual_seed(settings.seed)
        self.guidance = Guidance(settings.cfg)
        self.hparams, self.teacher, self.codes = settings, teacher, codes
        self.device, self.data = teacher.device, codes.data
        self.target = teacher.trainable()
        drafter = self.make()
        self.config: Any = drafter.config
        self.settings = {**self.config.flat(), **asdict(settings), **origins(teacher, codes)}
        self.samples_softmax = self.settings["sampling"] is None  # without temperature, top-k and top-p
        self.model = drafter.float().to(self.device).train()
        self.average = averaged(self.model)
        self.optimizers = self.make_optimizers()
        self.training_loss: Callable[..., Any] = self.loss
        num_pictures, variants = codes.train.codes.shape[:2]
        self.sampler = Sampler(num_pictures, variants, settings.batch_size, settings.seed)
        self.train, self.val = (CaptionPrompts(self.target, split) for split in (codes.train, codes.val))

    @classmethod
    def check(cls, settings: DrafterSettings, target: Target, source: TrainingData) -> None:
        """Check that the settings suit the target, before anything is drawn; raise InputError if not."""

    @classmethod
    def material(cls, settings: DrafterSettings, teacher: Teacher, source: TrainingData) -> tuple[Any, Any]:
        """Return the completed settings, and the material whose `build` returns the codes to learn from."""
        if source.codes is not None:
            return settings, folder_codes(source.codes, teacher.target)
        if source.own:
            prompts = choose_prompts(teacher, source.prompts, source.data)
            return settings, OwnCodes(teacher, prompts, source.samples, source.sample_batch, settings.seed)
        assert source.data is not None
        for split in ("train", "val"):
            texts = read_rows(source.data, split, source.limit).texts
            # The first caption is enough, as a text encoder may take seconds for each.
            if next(followed(teacher.target, texts), None) is None:
                raise InputError(NONE_FOLLOWED.format(source.data))
        reader = teacher.target.reader()
        return settings, PictureCodes(source.data, reader, teacher.store, source.crops, source.limit)

    @abstractmethod
    def make(self) -> Any:
        """Build the network, which has a config, with its first weights."""

    @abstractmethod
    def make_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Build the optimizers of `model`."""

    @abstractmethod
    def losses(self, index: Tensor, variant: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return `loss` of pictures index [B] in variants [B], which a step minimises, and more figures for the log, by `training_loss`.

        A loss `confidence` is minimised too; its gradient is not clipped.
        """

    def sampling_probs(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the distributions that codes at positions [B, n] are sampled from, of guided logits [B, n, V]."""
        return self.teacher.sampling.probs(self.target.constrain(logits, positions))

    @abstractmethod
    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss; `training_loss` is this function, compiled or not."""

    def speed_up(self) -> None:
        """Compile networks and loss as one graph of one shape. Validations have other shapes and are not compiled."""
        self.training_loss = torch.compile(self.loss, fullgraph=True, dynamic=False)

    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        """Update `model` once; return scalars for the log, still on the device."""
        index, variant, generator = self.sampler(step)
        with autocast(self.device):
            figures = self.losses(team().share(index), team().share(variant), generator)
        clipped = [p for name, p in self.model.named_parameters() if not name.startswith("confidence")]
        loss = figures["loss"] + figures.get("confidence", 0)
        descend(self.optimizers.values(), loss, clipped, max_norm=0.5)
        return {name: value for name, value in figures.items() if value.dim() == 0}

    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the config and the tensors of the averaged drafter."""
        config = {"kind": self.average.kind, **self.config.flat(), "target": mark(self.target)}
        return config, self.average.state_dict()


def train(
    model: str | Path,
    task_class: type[DrafterTask],
    settings: DrafterSettings,
    source: TrainingData,
    folder: Path,
    options: TrainingOptions,
) -> tuple[str, ...]:
    """Train a drafter of `model` in a folder; return the prompts of its validation, or () if interrupted.

    settings: `DrafterSettings.of` the task's kind; source and options: checked. Raise InputError, before anything is drawn or
    encoded, where the folder was trained with other settings.
    """
    if source.data is not None:
        for split in ("train", "val"):
            read_rows(source.data, split, source.limit)
    draws = source.own or source.rollouts is not None
    teacher = Teacher(model, folder, options.device, settings.cfg, draws)
    settings = replace(settings, cfg=teacher.cfg)
    task_class.check(settings, teacher.target, source)
    settings, material = task_class.material(settings, teacher, source)
    saved_state(folder, options.restart, asdict(settings) | origins(teacher, material), mmap=True)
    task = task_class(settings, teacher, material.build(), source)
    prompts = dict.fromkeys(text for text in task.val.texts if text is not None)
    return tuple(prompts) if run(task, folder, options) else ()


def origins(teacher: Teacher, material: Any) -> dict[str, Any]:
    """Return the target, the data and the sampling that a training depends on besides its own settings."""
    return {"target": teacher.origin, "data": material.key, "sampling": warping(teacher.sampling)}


def strengths(pipe: Pipeline, kind: Kind) -> list[Settings]:
    """Return the methods and strengths whose rates are stored with a drafter.

    Chains are as deep as rates are stored, since the rates of shorter drafts are read from the rates of the longest.
    """
    if kind == "eagle":
        return [pipe.settings("eagle", batch_size=BATCH_SIZE)]
    depth = min(MAX_DEPTH, pipe.target.length // 4)  # a pass counts only where all levels fit
    chain: dict[str, Any] = {"proposer": "parallel", "tree": f"chain-{depth}", "batch_size": BATCH_SIZE}
    relaxed = [pipe.settings("lantern++", lam=lam, **chain) for lam in LAMBDAS]
    return [pipe.settings("parallel", **chain), *relaxed]


def record_rates(
    pipe: Pipeline,
    methods: Sequence[Settings],
    folder: Path,
    prompts: Sequence[str | None],
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Draw with each of the settings for PASSES counted passes; write the rates to `acceptance.json` in the folder, unless the
    model draws latents; return codes per pass by method and strength."""
    rows, codes_per_pass = list[dict[str, Any]](), dict[str, float]()
    for number, settings in enumerate(methods):
        engine = pipe.new_engine(settings)
        counter, counted = AcceptanceByRank(pipe.target.length), 0
        engine.observers.append(counter)
        batch = ContinuousBatch(engine, zip(cycle(prompts), count(), strict=False))
        for _ in islice(batch.run(), 8 * PASSES):  # no pass counts where no draft fits into a picture
            counted = int(getattr(counter, "passes", 0))
            if progress:
                progress(number * PASSES + min(counted, PASSES), len(methods) * PASSES)
            if counted >= PASSES:
                break
        if counted:
            counts = Counts.of(counter)
            rows.append({"method": settings.method, "strength": strength(settings), "counts": asdict(counts)})
            name = settings.method if settings.lam is None else f"{settings.method} lambda {settings.lam:g}"
            codes_per_pass[name] = int(counter.codes) / counts.passes
    if not pipe.target.channels:
        write_text(folder / FILE, json.dumps({"acceptance": rows}) + "\n")
    return codes_per_pass
