"""The options of a drafter's training. Nothing here imports torch, so that help is quick."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from lanternpp.errors import InputError
from lanternpp.util.options import Option, option_of

Kind = Literal["eagle", "parallel"]
Stored = Literal["float32", "bfloat16", "int8", "int6"]
LOSSES = {"eagle": ("paper", "guided", "lk", "both"), "parallel": ("guided", "lk", "both", "block")}
USUAL: dict[str, dict[str, Any]] = {
    "eagle": {"loss": "guided", "lr": 1e-3, "noise": 0.2},
    "parallel": {"loss": "both", "lr": 2e-3, "noise": 0.1},
}


Eagle, Parallel = partial(Option, group="EAGLE"), partial(Option, group="Parallel")


def declared(options: Any) -> dict[str, Option]:
    """The options that a dataclass declares, or one that it derives from, as what a command line makes of it does."""
    hints = [get_type_hints(kind, include_extras=True) for kind in type(options).__mro__[:-1]]
    pairs = [(name, option_of(hint)) for each in hints for name, hint in each.items()]
    return {name: option for name, option in pairs if option is not None}


def check_options(options: Any) -> None:
    """InputError where a field of a dataclass of options is out of its range."""
    for name, option in declared(options).items():
        option.check(getattr(options, name), "--" + name.replace("_", "-"))


@dataclass(frozen=True)
class TrainingOptions:
    """How long, where and how to run: what may change between a run and its resumption."""

    folder: Path = Path()
    steps: Annotated[int | None, Option("Budget in steps, earlier runs counted in.", ge=1)] = None
    minutes: Annotated[float | None, Option("Budget in minutes, checks counted in.", gt=0)] = None
    device: Annotated[str, Option("auto, cpu, cuda or cuda:N.")] = "auto"
    compile: Annotated[bool, Option("Compile the networks and the loss.")] = False
    restart: Annotated[bool, Option("Start over instead of going on from a saved state.")] = False
    checks: Annotated[int, Option("Validations and saved states, evenly over the run.", ge=1)] = 12
    save_minutes: Annotated[float, Option("A state is also saved this often.", ge=0)] = 5.0
    store: Annotated[Stored, Option("Weights on disk; int8 and int6 have 8 and 6 bits.")] = "float32"
    log_steps: int = 25
    stop_after: int | None = None  # pause at this step as if interrupted

    def check(self) -> None:
        """InputError where there is no budget, or a value is out of range."""
        check_options(self)
        if self.steps is None and self.minutes is None:
            raise InputError("a training needs a budget: give --steps N, --minutes M or both.")

    def progress(self, step: int, seconds: float) -> float:
        """0..1: how much of the budget is spent."""
        parts = [step / self.steps] if self.steps else []
        parts += [seconds / 60 / self.minutes] if self.minutes else []
        return min(max(parts), 1.0)

    def affords(self, checking: float, seconds: float) -> bool:
        """Whether there is time for a check: with a budget in minutes, all but the last take a quarter of it at most."""
        return self.minutes is None or 4 * checking <= seconds


@dataclass(frozen=True)
class DrafterSettings:
    """Hyperparameters: all that decides the result, except the budget and the machine.

    EAGLE's loss is SmoothL1 on features + `weight` x a loss on distributions: `paper`, cross-entropy to the target's;
    `guided`, the same after guidance, which is what verification sees; `lk`, -log of the acceptance itself, after
    guidance; `both`, the sum of these two. A parallel drafter has one of the last three at each level, level l counting
    `fade` ** l; `block` is `guided` and, for the chain as a whole, -log of the codes that block verification would decide
    of a draft (`drafts.keep_chances`).
    """

    cfg: Annotated[float | None, Option("Guidance supposed; default: the model's own.", ge=1)] = None
    loss: Annotated[
        Literal["paper", "guided", "lk", "both", "block"] | None,
        Option(
            "paper (eagle): the target's distribution; guided: after guidance; lk: the acceptance; both: the last two; "
            "block (parallel): guided, and the codes that block verification keeps. Default: guided, or both (parallel)."
        ),
    ] = None
    lr: Annotated[
        float | None, Option("Peak learning rate; default: 1e-3, or 2e-3 (parallel).", gt=0, le=1)
    ] = None
    noise: Annotated[
        float | None, Option("Width of uniform noise on features; default: 0.2, or 0.1 (parallel).", ge=0)
    ] = None
    layers: Annotated[int, Option("Blocks.", ge=1)] = 1
    batch_size: Annotated[int, Option("Pictures a step.", ge=1)] = 16
    seed: Annotated[int, Option("Seed of weights, data order and noise.", ge=0, le=2**32)] = 0
    decay: Annotated[float, Option("Of the moving average of the weights, per step.", ge=0, le=1)] = 0.995
    warmup: Annotated[int, Option("Steps of linear warm-up.", ge=1)] = 100
    weight: Annotated[float, Eagle("Weight of the loss on distributions.", ge=0)] = 0.1
    rounds: Annotated[int, Eagle("Passes per step, later ones on own features (HASS, 2408.15766).", ge=1)] = 1
    inherit: Annotated[bool, Eagle("Begin as the target's last block.")] = False
    drop_captions: Annotated[float, Eagle("Share without caption, under loss paper.", ge=0, le=0.99)] = 0.1
    muon_lr: Annotated[float, Parallel("Peak rate of Muon, in AdamW's scale.", gt=0, le=1)] = 8e-3
    levels: Annotated[int, Parallel("Codes of a draft.", ge=2, le=64)] = 14
    fade: Annotated[float, Parallel("Weight of a level, relative to the one before.", gt=0, le=1)] = 0.88
    aux_layers: Annotated[int, Parallel("Layers of the target below its last that it reads too.", ge=0)] = 0
    anchors: Annotated[int, Parallel("Slots of a picture after which a step drafts.", ge=1)] = 20
    firsts: Annotated[int, Parallel("Slots after which only a first level is learned.", ge=1)] = 128
    turn: Annotated[int, Parallel("Width of the layers that condition on a code.", ge=1)] = 256

    def of(self, kind: Kind) -> DrafterSettings:
        """The settings with what is usual for a kind of drafter. InputError where one is of the other kind, or wrong."""
        check_options(self)
        for name, option in declared(self).items():
            if option.group.lower() not in ("", kind) and getattr(self, name) != getattr(
                DrafterSettings, name
            ):
                raise InputError(
                    f"--{name.replace('_', '-')} is for drafters of --kind {option.group.lower()}: leave it out."
                )
        found = replace(self, **{name: x for name, x in USUAL[kind].items() if getattr(self, name) is None})
        if found.loss not in LOSSES[kind]:
            raise InputError(f"loss {found.loss!r} is none of {kind}'s: choose {', '.join(LOSSES[kind])}.")
        return found


@dataclass(frozen=True)
class TrainingData:
    """What a drafter learns from: the pictures in a folder, those that the target draws itself, or a folder of codes."""

    data: Annotated[Path | None, Option("Imagefolder; with --self, only its captions are used.")] = None
    own: Annotated[bool, Option("Learn from what the target draws itself.", names=("--self",))] = False
    prompts: Annotated[
        Path | None, Option("What it draws, a prompt a line; default: --data's captions, or its own.")
    ] = None
    samples: Annotated[
        int | None, Option("Pictures it draws; default: one a prompt, at least 100.", ge=1)
    ] = None
    sample_batch: Annotated[int, Option("Pictures it draws at once.", ge=1)] = 8
    codes: Annotated[Path | None, Option("Folder of codes, such as MODEL/codes/self-*.")] = None
    crops: Annotated[int, Option("Crops of each training picture, each also mirrored.", ge=1)] = 2
    limit: Annotated[int | None, Option("Use only this many pictures of each split.", ge=1)] = None

    def check(self) -> None:
        """InputError where there is nothing to learn from."""
        check_options(self)
        for name in ("prompts", "samples"):
            if getattr(self, name) is not None and not self.own:
                raise InputError(f"--{name} says what the target draws itself: add --self.")
        if self.codes is not None and (self.own or self.data is not None):
            raise InputError("--codes DIR holds all that is learned from: leave --self and --data out.")
        if not self.own and self.data is None and self.codes is None:
            raise InputError(
                "a drafter learns from pictures, --data DIR, from what its target draws, --self, or from --codes DIR."
            )
