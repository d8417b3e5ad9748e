"""The options of a drafter's training, whose ranges the command line checks. This module does not import torch, so that help is quick."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

from lanternpp.errors import InputError
from lanternpp.util.jsonfile import read_object
from lanternpp.util.options import Option, declared

Kind = Literal["eagle", "parallel"]
Stored = Literal["float32", "bfloat16", "int8", "int6"]
LOSSES = {"eagle": ("paper", "guided", "lk", "both"), "parallel": ("guided", "lk", "both", "block")}
DEFAULTS: dict[str, dict[str, Any]] = {
    "eagle": {"loss": "guided", "lr": 1e-3, "noise": 0.2},
    "parallel": {"loss": "both", "lr": 2e-3, "noise": 0.1},
}

# Fields of `TrainingData` that each source of training data reads, besides its own; a source that is above goes first.
USED = {
    "rollouts": ("drafter", "method", "own", "data", "prompts", "sample_batch"),
    "codes": (),
    "own": ("data", "prompts", "samples", "sample_batch"),
    "data": ("crops", "limit"),
}

# Hyperparameters of drafters and of the networks of a recipe.
Rate = Annotated[float, Option("Peak learning rate.", gt=0, le=1)]
Batch = Annotated[int, Option("Pictures a step.", ge=1)]
Decay = Annotated[float, Option("Of the moving average of the weights, per step.", ge=0, le=1)]
Warmup = Annotated[int, Option("Steps of linear warm-up.", ge=1)]
# A picture that the target draws has a seed of 64 bits, and this seed is the upper half.
Seed = Annotated[int, Option("Seed of weights, data order and noise.", ge=0, le=2 * 10**9)]
Eagle, Parallel = partial(Option, group="EAGLE"), partial(Option, group="Parallel")


def flag(name: str) -> str:
    """Return a field's name on the command line."""
    return "--self" if name == "own" else "--" + name.replace("_", "-")


def check_kind(options: Any, kind: str, selector: str = "--kind") -> None:
    """Raise InputError where a field of a dataclass of options is given, and its group is another kind than the selector's."""
    for name, option in declared(type(options)).items():
        group = option.group.lower()
        if group not in ("", kind) and getattr(options, name) != getattr(type(options), name):
            raise InputError(
                f"{flag(name)} is for {selector} {group}: leave it out, or give that {selector}."
            )


@dataclass(frozen=True)
class TrainingOptions:
    """The budget, device and checks of a run: all options that may change between a run and its resumption."""

    steps: Annotated[int | None, Option("Budget in steps, earlier runs counted in.", ge=1)] = None
    minutes: Annotated[float | None, Option("Budget in minutes, checks counted in.", gt=0)] = None
    device: Annotated[str, Option("auto, cpu, cuda or cuda:N.")] = "auto"
    compile: Annotated[bool, Option("Compile the networks and the loss.")] = False
    restart: Annotated[bool, Option("Start over instead of going on from a saved state.")] = False
    checks: Annotated[
        int, Option("Validations and saved states, evenly over the run; 1 for a trial of a few steps.", ge=1)
    ] = 12
    save_minutes: Annotated[float, Option("A state is also saved this often.", ge=0)] = 5.0
    store: Annotated[Stored, Option("Weights on disk; int8 and int6 have 8 and 6 bits.")] = "float32"

    def check(self) -> None:
        """Check that there is a budget; raise InputError if not."""
        if self.steps is None and self.minutes is None:
            raise InputError("a training needs a budget: give --steps N, --minutes M or both.")

    def progress(self, step: int, seconds: float) -> float:
        """Return the used share of the budget, 0..1."""
        return min(max(step / (self.steps or inf), seconds / 60 / (self.minutes or inf)), 1.0)


@dataclass(frozen=True)
class DrafterSettings:
    """Hyperparameters: all that decides the result, except the budget and the machine.

    EAGLE's loss is SmoothL1 on features + `weight` x a loss on distributions: `paper`, cross-entropy to the target's;
    `guided`, the same after guidance, as in verification; `lk`, -log of the acceptance, after guidance; `both`, the sum of
    `guided` and `lk`. A parallel drafter has one of the last three at each level l, with the weight `fade` ** l; `block` is
    `guided` plus -log of the number of codes that block verification would decide per draft (`parallel.chain_acceptance`).
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
    batch_size: Batch = 16
    seed: Seed = 0
    decay: Decay = 0.995
    warmup: Warmup = 100
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
    condition_width: Annotated[int, Parallel("Width of the layers that condition on a code.", ge=1)] = 256

    def of(self, kind: Kind) -> DrafterSettings:
        """Return the settings with the defaults of a kind of drafter; raise InputError where one is of the other kind or has no effect."""
        check_kind(self, kind)
        defaults = {name: x for name, x in DEFAULTS[kind].items() if getattr(self, name) is None}
        settings = replace(self, **defaults)
        if settings.loss not in LOSSES[kind]:
            raise InputError(f"loss {settings.loss!r} is none of {kind}'s: choose {', '.join(LOSSES[kind])}.")
        if settings.loss != "paper" and settings.drop_captions != DrafterSettings.drop_captions:
            raise InputError(f"--drop-captions has no effect with --loss {settings.loss}: add --loss paper.")
        return settings


@dataclass(frozen=True)
class TrainingData:
    """A drafter's training data: pictures in a folder, pictures or runs that the target draws itself, or a folder of codes.

    data: Imagefolder; with --self, only its captions are used.
    own: Learn from what the target draws itself.
    prompts: What it draws, a prompt a line; default: --data's captions, or its own.
    samples: Pictures it draws; default: one a prompt, at least 100.
    sample_batch: Pictures or runs it draws at once; a GPU is fastest with some hundred.
    codes: Folder of codes, such as MODEL/codes/self-*.
    crops: Crops of each training picture, each also mirrored.
    limit: Use only this many pictures of each split.
    cache_features: Keep the target's features on disk; takes room, saves its passes.
    rollouts: Go on with a parallel drafter, on N runs of the target with it, recorded first.
    drafter: --rollouts: the parallel drafter to go on with.
    method: --rollouts: the method by whose rule and verification runs are drawn.
    """

    data: Path | None = None
    own: Annotated[bool, Option(names=("--self",))] = False
    prompts: Path | None = None
    samples: Annotated[int | None, Option(ge=1)] = None
    sample_batch: Annotated[int, Option(ge=1)] = 8
    codes: Path | None = None
    crops: Annotated[int, Option(ge=1)] = 2
    limit: Annotated[int | None, Option(ge=1)] = None
    cache_features: Annotated[bool, Eagle()] = False
    rollouts: Annotated[int | None, Parallel(ge=1, metavar="N")] = None
    drafter: Annotated[Path | None, Parallel(metavar="DIR")] = None
    method: Annotated[str, Parallel(metavar="NAME")] = "parallel"

    def check(self, kind: Kind) -> None:
        """Check that there is data for a drafter of this kind, and no option without effect; raise InputError if not."""
        check_kind(self, kind)
        given = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        source = next((name for name in USED if name in given), None)
        if source is None:
            raise InputError(
                "a drafter learns from pictures, --data DIR, from what its target draws, --self, or from --codes DIR."
            )
        for name in given:
            if name not in (source, "cache_features", *USED[source]):
                owners = [other for other, used in USED.items() if {name, source} <= set(used)]
                hint = f"add {flag(owners[-1])}" if owners else "leave one of the two out"
                raise InputError(f"{flag(name)} has no effect with {flag(source)}: {hint}.")
        if source != "rollouts":
            return
        config = None if self.drafter is None else self.drafter / "config.json"
        if config is None or not config.is_file() or read_object(config).get("kind") != "parallel":
            raise InputError(
                f"--rollouts goes on with a parallel drafter, but there is none in --drafter {self.drafter or 'DIR'}: train "
                "one first, without --rollouts, and name its folder."
            )
