"""The base class of drafters' trainings: settings, material, a step, export; and the acceptance rates that a drafter is stored with."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.api.options import Settings
from lanternpp.api.pipeline import Pipeline
from lanternpp.api.rates import FILE, Counts, strength
from lanternpp.drafters.base import mark
from lanternpp.engine.batching import ContinuousBatch
from lanternpp.engine.observers import AcceptanceByRank
from lanternpp.engine.sampling import Guidance
from lanternpp.models.base import Target
from lanternpp.training.codes import Codes, OwnCodes, PictureCodes, Sampler, choose_prompts, folder_codes
from lanternpp.training.features import CaptionPrompts
from lanternpp.training.loop import run, team
from lanternpp.training.options import DrafterSettings, TrainingData, TrainingOptions
from lanternpp.training.pictures import read_rows
from lanternpp.training.state import Task, averaged, check_resumable
from lanternpp.training.teacher import Teacher, warping
from lanternpp.util.files import write_text

DEEPEST = 16  # drafts whose rates are stored
PASSES, AT_ONCE = 500, 2  # by which they are counted, and pictures drawn at once
LAMBDAS = (1.5, 2.0, 3.0)  # strengths of LANTERN++ whose rates are stored


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
        self.settings = {**self.config.flat(), **asdict(settings), **origins(teacher, codes)}
        self.plain = self.settings["sampling"] is None  # codes are drawn from the softmax of logits
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

    def sampled(self, logits: Tensor, place: Tensor) -> Tensor:
        """Guided logits [B, n, V] of the codes at places [B, n] -> the distributions that these are drawn from."""
        return self.teacher.sampling.probs(self.target.constrain(logits, place))

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

    settings: `DrafterSettings.of` the task's kind; source and options: checked. InputError where the folder was trained with
    other settings: before anything is drawn or encoded.
    """
    if source.data is not None:
        for split in ("train", "val"):
            read_rows(source.data, split, source.limit)
    early = {name: value for name, value in asdict(settings).items() if name not in task.found}
    check_resumable(options, early)
    teacher = Teacher(model, options, settings.cfg, source.own or source.rollouts is not None)
    settings = replace(settings, cfg=teacher.cfg)
    task.check(settings, teacher.target, source)
    settings, material = task.material(settings, teacher, source)
    found = {name: getattr(settings, name) for name in task.found}
    check_resumable(options, found | origins(teacher, material))
    made = task(settings, teacher, material.build(), source)
    prompts = dict.fromkeys(text for text in made.val.texts if text is not None)
    return tuple(prompts) if run(made, options) else ()


def origins(teacher: Teacher, material: Any) -> dict[str, Any]:
    """What a training depends on besides its own settings."""
    return {"target": teacher.origin, "data": material.key, "sampling": warping(teacher.sampling)}


def strengths(pipe: Pipeline, kind: str) -> list[Settings]:
    """The methods and strengths whose rates are stored with a drafter of this kind, "parallel" or "eagle", or, "jacobi", with a model.

    Each has the deepest draft, from whose rates those of shorter ones are read.
    """
    depth = min(DEEPEST, pipe.target.length // 4)  # only drafts with room for all levels are counted
    chain: dict[str, Any] = {"proposer": "parallel", "tree": f"chain-{depth}"}
    named: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "parallel": [("parallel", chain), *(("lantern++", chain | {"lam": lam}) for lam in LAMBDAS)],
        "jacobi": [(name, {"window": depth}) for name in ("jacobi", "jacobi-coupled", "lantern-jacobi")],
        "eagle": [("eagle", {})],
    }
    return [pipe.settings(method, batch_size=AT_ONCE, **dials) for method, dials in named[kind]]


def record_rates(
    pipe: Pipeline,
    methods: Sequence[Settings],
    folder: Path,
    prompts: Sequence[str | None],
    passes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Draw with each of these settings for so many passes, by default PASSES, and write the rates of models of codes to
    `acceptance.json` in a folder. Returns codes per pass by method and strength."""
    rows, found, passes = list[dict[str, Any]](), dict[str, float](), passes or PASSES
    for place, settings in enumerate(methods):
        engine = pipe.new_engine(settings)
        counter = AcceptanceByRank(pipe.target.length)
        engine.observers.append(counter)
        batch = ContinuousBatch(engine, zip(cycle(prompts), count(), strict=False))
        for _ in islice(batch.run(), 8 * passes):  # none are counted where no draft fits into a picture
            done = int(getattr(counter, "passes", 0))
            if progress:
                progress(place * passes + min(done, passes), len(methods) * passes)
            if done >= passes:
                break
        if int(getattr(counter, "passes", 0)):
            counts = Counts.of(counter)
            rows.append({"method": settings.method, "strength": strength(settings), "counts": asdict(counts)})
            relaxed = f" lambda {settings.lam:g}" if settings.lam is not None else ""
            found[f"{settings.method}{relaxed}"] = int(counter.codes) / counts.passes
    if not pipe.target.channels:
        write_text(folder / FILE, json.dumps({"acceptance": rows}) + "\n")
    return found
