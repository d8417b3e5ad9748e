"""`lanternpp train`: a drafter for a target."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lanternpp.cli.old_options import bundled
from lanternpp.cli.output import writable_folder
from lanternpp.errors import InputError

if TYPE_CHECKING:
    from lanternpp.training.run import TrainingOptions

STAGES = {
    "tokenizer": "tokenizer",
    "target": "target",
    "classifier": "classifier",
    "judge": "classifier",
}  # verbs of earlier versions

Planned = Callable[..., "TrainingOptions"]

Steps = Annotated[int | None, typer.Option(help="Budget in steps, earlier runs counted in.")]
Minutes = Annotated[
    float | None, typer.Option(help="Budget in minutes, earlier runs and validations counted in.")
]
Seed = Annotated[int, typer.Option(help="Seed of weights, data order and noise.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Compiled = Annotated[bool, typer.Option("--compile/--no-compile")]
Resume = Annotated[bool, typer.Option("--resume/--restart", help="Go on from a saved state, or start over.")]
Checks = Annotated[int, typer.Option(help="Validations, samples and saved states over the run.")]
Stored = Literal["float32", "bfloat16", "int8", "int6"]
Store = Annotated[Stored, typer.Option(help="Weights on disk: float32, bfloat16, or 8 or 6 bits a number.")]
Crops = Annotated[int, typer.Option(help="Crops of each training picture, each also mirrored; encoded once.")]
Decay = Annotated[float, typer.Option(help="Of the moving average of the weights, per step.")]
Warmup = Annotated[int, typer.Option(help="Steps of linear warm-up.")]
Limit = Annotated[int | None, typer.Option(help="Use only this many pictures of each split.")]


def plans(checks: int, store: Stored = "float32") -> Callable[..., Any]:
    """The options all trainings share: a verb's argument `plan` makes the plan of a run that writes to a folder."""
    options = {
        "steps": (Steps, None),
        "minutes": (Minutes, None),
        "device": (Device, "auto"),
        "compiled": (Compiled, False),
        "resume": (Resume, True),
        "checks": (Checks, checks),
        "store": (Store, store),
    }

    def plan(folder: Path, device: str, compiled: bool, resume: bool, **more: Any) -> TrainingOptions:
        from lanternpp.training.hardware import pick
        from lanternpp.training.run import TrainingOptions

        place, on = writable_folder(folder), pick(device)
        return TrainingOptions(place, device=on, compile=compiled, restart=not resume, **more)

    return bundled("plan", options, lambda **given: partial(plan, **given))


def leave(finished: bool) -> None:
    """130 after an interrupt, as a shell expects."""
    if not finished:
        raise typer.Exit(130)


@plans(12)
def train(
    stage: Annotated[str | None, typer.Argument(hidden=True)] = None,
    *,
    model: Annotated[
        str, typer.Option(metavar="NAME|DIR|HUB_ID", help="The target, trained here or published.")
    ],
    data: Annotated[
        Path | None, typer.Option(help="Imagefolder to learn from; with --self, only its captions are used.")
    ] = None,
    own: Annotated[
        bool, typer.Option("--self", help="Learn from pictures that the target draws itself.")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What it draws, one prompt a line; default: --data's captions, or its own."
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(metavar="N", help="Pictures it draws; default: one of every prompt, at least 100."),
    ] = None,
    sample_batch: Annotated[int, typer.Option(help="Pictures it draws at once.")] = 8,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the drafter goes; default: drafter/ or parallel/ in MODEL."),
    ] = None,
    kind: Annotated[
        Literal["eagle", "parallel"],
        typer.Option(help="eagle: a code at a time; parallel: all levels of a draft in one pass."),
    ] = "eagle",
    rollouts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Go on with a parallel drafter, on N runs of the target with it, recorded first.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="--rollouts: the method by whose rule and verification they are drawn. Default: parallel, lossless.",
        ),
    ] = None,
    loss: Annotated[
        Literal["paper", "guided", "lk", "both", "block"] | None,
        typer.Option(
            help="paper (eagle): the target's distribution; guided: after guidance; lk: the acceptance; both: the last "
            "two; block (parallel): guided, and the codes of a draft that block verification keeps. "
            "Default: guided of eagle, both of parallel."
        ),
    ] = None,
    levels: Annotated[
        int | None,
        typer.Option(
            help="parallel: codes of a draft; a drafter that --rollouts goes on with grows to so many. Default: 14."
        ),
    ] = None,
    fade: Annotated[
        float | None,
        typer.Option(
            help="parallel: weight of each level in the loss, relative to the one before. Default: 0.88."
        ),
    ] = None,
    aux_layers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="parallel: layers of the target below its last that the drafter reads too, evenly spread. Default: 0.",
        ),
    ] = None,
    weight: Annotated[
        float | None, typer.Option(help="eagle: of that loss beside SmoothL1 on the features. Default: 0.1.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="eagle: how often it looks, each time but the first at its own features. Default: 1."
        ),
    ] = None,
    cfg: Annotated[
        float | None,
        typer.Option(
            help="Guidance that --self, guided, lk and the figures suppose; default: the model's own."
        ),
    ] = None,
    layers: Annotated[
        int, typer.Option(help="Blocks; a drafter that --rollouts goes on with grows to so many.")
    ] = 1,
    batch_size: Annotated[int, typer.Option(help="Pictures a step.")] = 16,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Peak learning rate; the papers' long runs use 1e-4. Default: 1e-3 of eagle, 2e-3 of parallel."
        ),
    ] = None,
    muon_lr: Annotated[
        float | None,
        typer.Option(help="parallel: peak rate of Muon (matrices), in AdamW's scale. Default: 8e-3."),
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            help="Width of the uniform noise on the features. Default: 0.2 of eagle, 0.1 of parallel."
        ),
    ] = None,
    inherit: Annotated[
        bool | None, typer.Option("--inherit", help="eagle: begin as the target's last block.")
    ] = None,
    crops: Crops = 2,
    decay: Decay = 0.995,
    warmup: Warmup = 100,
    seed: Seed = 0,
    cache_features: Annotated[
        bool | None,
        typer.Option(
            "--cache-features",
            help="eagle: keep the target's features on disk; takes room, saves its passes.",
        ),
    ] = None,
    save_minutes: Annotated[float, typer.Option(help="A state to resume from is saved this often.")] = 5.0,
    limit: Limit = None,
    plan: Planned,
) -> None:
    """Train a drafter for a target, on pictures or, with --self, on what the target draws."""
    if stage is not None:
        refuse_stage(stage)
    from lanternpp.training import drafter as eagle
    from lanternpp.training import parallel
    from lanternpp.training import rollouts as runs
    from lanternpp.training.material.samples import SelfSampling
    from lanternpp.training.teacher import drafter_folder

    check_self(own, data, prompts=prompts, samples=samples)
    shared: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "decay": decay, "warmup": warmup}
    shared |= given(loss=loss, lr=lr, noise=noise, cfg=cfg)
    folder = drafter_folder(model, out, "drafter" if kind == "eagle" else kind)
    where = plan(folder, save_minutes=save_minutes)
    drawn = SelfSampling(prompts, samples, sample_batch, seed) if own else None
    only = given(weight=weight, rounds=rounds, inherit=inherit)
    only_parallel = given(levels=levels, fade=fade, aux_layers=aux_layers, muon_lr=muon_lr)
    keep = bool(cache_features)
    if method is not None and rollouts is None:
        raise InputError("--method says how the runs of --rollouts are drawn: add --rollouts N.")
    if kind == "eagle":
        if only_parallel:
            raise InputError(f"--{option(only_parallel)} is for drafters of --kind parallel: leave it out.")
        if rollouts is not None:
            raise InputError(
                "--rollouts is for drafters of --kind parallel: an EAGLE drafter hears nothing of them."
            )
        eagle_hparams = eagle.DrafterSettings(**shared, **only)
        leave(eagle.train(data, model, layers, eagle_hparams, where, crops, limit, drawn, cfg is None, keep))
        store_rates(model, out, folder, "eagle")
        say_how(model, out, "eagle")
        return
    only |= given(cache_features=cache_features)
    if only:
        raise InputError(f"--{option(only)} is for drafters of --kind eagle: leave it out.")
    hparams = parallel.ParallelSettings(**shared, **only_parallel)
    if rollouts is not None and rollouts < 1:
        raise InputError(f"--rollouts {rollouts} must be at least 1.")
    if rollouts is None:
        leave(parallel.train(data, model, layers, hparams, where, crops, limit, drawn, follow=cfg is None))
    else:
        more = {"follow": cfg is None, "layers": layers} | given(method=method)
        leave(runs.train(data, model, hparams, where, rollouts, drawn, **more))
    store_rates(model, out, folder, kind)
    say_how(model, out, kind)


def refuse_stage(stage: str) -> None:
    """InputError that names what an argument of earlier versions is now."""
    if stage in STAGES:
        raise InputError(f"`train {stage}` is now `python recipes/nature/{STAGES[stage]}.py` in a checkout.")
    if stage == "drafter":
        raise InputError("`train drafter` is now `train`: leave the word out.")
    raise InputError(f"train takes options alone, not {stage!r}.")


def store_rates(model: str, out: Path | None, folder: Path, kind: str) -> None:
    """Count the acceptance rates of a drafter, by which drafts are fitted to a machine, and store them with it."""
    from lanternpp.api.pipeline import Pipeline
    from lanternpp.cli.terminal import progress_bar
    from lanternpp.evaluation.prompts import usual_conditions
    from lanternpp.training.rates import record, strengths
    from lanternpp.training.team import team

    if not team().leads:
        return
    pipe = Pipeline.from_pretrained(model, out, tuned=False)
    if not pipe.target.channels:
        with progress_bar("counting what is accepted") as progress:
            record(
                pipe,
                strengths(pipe, kind),
                folder,
                usual_conditions(pipe.folder, pipe.target),
                progress=progress,
            )


def say_how(model: str, out: Path | None, method: str) -> None:
    """Say which command draws with what was trained."""
    from lanternpp.training.team import team

    if team().leads:
        other = ["--drafter", str(out)] if out else []
        words = ["lanternpp", "compare", "PROMPT", "--model", model, *other, "--method", method]
        print(f"draw with it: {shlex.join(words)}", file=sys.stderr)


def given(**options: Any) -> dict[str, Any]:
    """Those that were given."""
    return {name: value for name, value in options.items() if value is not None}


def option(options: dict[str, Any]) -> str:
    """The first of them, as it is written on the command line."""
    return next(iter(options)).replace("_", "-")


def check_self(own: bool, data: Path | None, **self_only: object) -> None:
    """Refuse a drafter without anything to learn from, and options that only --self reads."""
    given = [name for name, value in self_only.items() if value is not None]
    if given and not own:
        raise InputError(f"--{given[0]} says what the target draws itself: add --self.")
    if data is None and not own:
        raise InputError("a drafter learns from pictures, --data DIR, or from what its target draws, --self.")
