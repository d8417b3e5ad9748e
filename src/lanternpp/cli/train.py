"""`lanternpp train`: the tokenizer, the target, the drafter and the judge of a model, in that order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lanternpp.errors import InputError

if TYPE_CHECKING:
    from lanternpp.training.run import Plan

app = typer.Typer(no_args_is_help=True)

Data = Annotated[Path, typer.Option(help="Imagefolder with train/ and val/, each with metadata.jsonl.")]
Model = Annotated[Path, typer.Option(help="Model folder to write to.")]
Steps = Annotated[int | None, typer.Option(help="Budget in steps, earlier runs counted in.")]
Minutes = Annotated[float | None, typer.Option(help="Budget in minutes, earlier runs counted in.")]
Seed = Annotated[int, typer.Option(help="Seed of weights, data order and noise.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Resume = Annotated[bool, typer.Option("--resume/--restart", help="Go on from a saved state, or start over.")]
Checks = Annotated[int, typer.Option(help="Validations, samples and saved states over the run.")]
Store = Annotated[
    Literal["float32", "bfloat16", "int8"], typer.Option(help="Weights on disk: float32, bfloat16 or int8.")
]
Crops = Annotated[int, typer.Option(help="Crops of each training picture, each also mirrored; encoded once.")]
Decay = Annotated[float, typer.Option(help="Of the moving average of the weights, per step.")]
Warmup = Annotated[int, typer.Option(help="Steps of linear warm-up.")]
Limit = Annotated[int | None, typer.Option(help="Use only this many pictures of each split.")]


def plan(
    folder: Path,
    steps: int | None,
    minutes: float | None,
    device: str,
    compiled: bool,
    resume: bool,
    checks: int,
    store: Literal["float32", "bfloat16", "int8"],
    save_minutes: float = 5.0,
) -> Plan:
    """The options all trainings share."""
    from lanternpp.training.hardware import pick
    from lanternpp.training.run import Plan

    return Plan(
        folder,
        steps,
        minutes,
        restart=not resume,
        device=pick(device),
        compile=compiled,
        checks=checks,
        store=store,
        save_minutes=save_minutes,
    )


def leave(finished: bool) -> None:
    """130 after an interrupt, as a shell expects."""
    if not finished:
        raise typer.Exit(130)


@app.callback()
def main() -> None:
    """Train a model's tokenizer, target, drafter and judge; each run resumes where it stopped."""


@app.command()
def tokenizer(
    data: Data,
    model: Model,
    size: Annotated[int, typer.Option(help="Pixels of an image's side.")] = 128,
    codes: Annotated[int, typer.Option(help="Entries of the codebook.")] = 4096,
    steps: Steps = None,
    minutes: Minutes = None,
    batch_size: Annotated[int, typer.Option(help="Pictures a step.")] = 128,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 4e-4,
    adversarial: Annotated[bool, typer.Option(help="Sharpen the decoder against a discriminator.")] = False,
    adversarial_start: Annotated[float, typer.Option(help="Share of the budget before that.")] = 0.5,
    adversarial_weight: Annotated[
        float, typer.Option(help="Its gradient, in lengths of the reconstruction's.")
    ] = 0.3,
    seed: Seed = 0,
    device: Device = "auto",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile")] = False,
    resume: Resume = True,
    checks: Checks = 20,
    store: Store = "float32",
    limit: Limit = None,
) -> None:
    """Train the tokenizer: pictures <-> codes."""
    from lanternpp.training.tokenizer import TokenizerSettings, train
    from lanternpp.vq.model import VQConfig

    settings = TokenizerSettings(batch_size, lr, seed, adversarial, adversarial_start, adversarial_weight)
    where = plan(model / "tokenizer", steps, minutes, device, compiled, resume, checks, store)
    leave(train(data, model, VQConfig(size, codes), settings, where, limit))


@app.command()
def target(
    data: Data,
    model: Model,
    dim: Annotated[int, typer.Option(help="Width.")] = 384,
    layers: Annotated[int, typer.Option(help="Blocks.")] = 14,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 6,
    hidden: Annotated[int, typer.Option(help="Width inside a block's SwiGLU.")] = 1024,
    steps: Steps = None,
    minutes: Minutes = None,
    batch_size: Annotated[int, typer.Option(help="Pictures a step.")] = 24,
    lr: Annotated[float, typer.Option(help="Peak rate of AdamW (tables, prefix, norms).")] = 1.5e-3,
    muon_lr: Annotated[float, typer.Option(help="Peak rate of Muon (matrices), in AdamW's scale.")] = 2e-3,
    dropout: Annotated[float, typer.Option(help="Dropout inside the blocks.")] = 0.0,
    corrupt: Annotated[
        float, typer.Option(help="Share of the codes it reads replaced by random ones.")
    ] = 0.0,
    crops: Crops = 2,
    decay: Decay = 0.995,
    warmup: Warmup = 100,
    cfg: Annotated[float, typer.Option(help="Guidance of the sample pictures.")] = 2.5,
    seed: Seed = 0,
    device: Device = "auto",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile")] = False,
    resume: Resume = True,
    checks: Checks = 12,
    store: Store = "float32",
    limit: Limit = None,
) -> None:
    """Train the target: codes from captions, one after another. Needs a trained tokenizer."""
    from lanternpp.training.target import TargetSettings, train

    settings = TargetSettings(batch_size, lr, muon_lr, seed, corrupt, decay=decay, warmup=warmup, cfg=cfg)
    shape = {"dim": dim, "layers": layers, "heads": heads, "hidden": hidden, "dropout": dropout}
    where = plan(model / "target", steps, minutes, device, compiled, resume, checks, store)
    leave(train(data, model, shape, settings, where, crops, limit))


@app.command()
def drafter(
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
    loss: Annotated[
        Literal["paper", "guided", "lk", "both"] | None,
        typer.Option(
            help="paper: the target's distribution; guided: after guidance; lk: the acceptance; both: the last "
            "two. Default: paper of eagle, both of parallel."
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
    layers: Annotated[int, typer.Option(help="Blocks.")] = 1,
    steps: Steps = None,
    minutes: Minutes = None,
    batch_size: Annotated[int, typer.Option(help="Pictures a step.")] = 16,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Peak learning rate; the papers' long runs use 1e-4. Default: 1e-3 of eagle, 2e-3 of parallel."
        ),
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
    device: Device = "auto",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile")] = False,
    resume: Resume = True,
    checks: Checks = 12,
    cache_features: Annotated[
        bool | None,
        typer.Option(
            "--cache-features",
            help="eagle: keep the target's features on disk; takes room, saves its passes.",
        ),
    ] = None,
    store: Store = "float32",
    save_minutes: Annotated[float, typer.Option(help="A state to resume from is saved this often.")] = 5.0,
    limit: Limit = None,
) -> None:
    """Train a drafter for a target, on pictures or, with --self, on what the target draws."""
    from lanternpp.training import drafter as eagle
    from lanternpp.training import parallel
    from lanternpp.training import rollouts as runs
    from lanternpp.training.samples import Own
    from lanternpp.training.teacher import drafter_folder

    check_self(own, data, prompts=prompts, samples=samples)
    shared: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "decay": decay, "warmup": warmup}
    shared |= given(loss=loss, lr=lr, noise=noise, cfg=cfg)
    folder = drafter_folder(model, out, "drafter" if kind == "eagle" else kind)
    where = plan(folder, steps, minutes, device, compiled, resume, checks, store, save_minutes)
    drawn = Own(prompts, samples, sample_batch, seed) if own else None
    only = given(weight=weight, rounds=rounds, inherit=inherit)
    keep = bool(cache_features)
    if kind == "eagle":
        if rollouts is not None:
            raise InputError(
                "--rollouts is for drafters of --kind parallel: an EAGLE drafter hears nothing of them."
            )
        settings = eagle.DrafterSettings(**shared, **only)
        leave(eagle.train(data, model, layers, settings, where, crops, limit, drawn, cfg is None, keep))
        return
    only |= given(cache_features=cache_features)
    if only:
        raise InputError(
            f"--{next(iter(only)).replace('_', '-')} is for drafters of --kind eagle: leave it out."
        )
    asked = parallel.ParallelSettings(**shared)
    if rollouts is None:
        leave(parallel.train(data, model, layers, asked, where, crops, limit, drawn, follow=cfg is None))
    else:
        leave(runs.train(data, model, asked, where, rollouts, drawn, follow=cfg is None))


def given(**options: Any) -> dict[str, Any]:
    """Those that were given."""
    return {name: value for name, value in options.items() if value is not None}


def check_self(own: bool, data: Path | None, **wanted: object) -> None:
    """Refuse a drafter without anything to learn from, and options that only --self reads."""
    given = [name for name, value in wanted.items() if value is not None]
    if given and not own:
        raise InputError(f"--{given[0]} says what the target draws itself: add --self.")
    if data is None and not own:
        raise InputError("a drafter learns from pictures, --data DIR, or from what its target draws, --self.")


@app.command()
def judge(
    data: Data,
    model: Model,
    steps: Steps = None,
    minutes: Minutes = None,
    batch_size: Annotated[int, typer.Option(help="Pictures a step.")] = 64,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    redrawn: Annotated[
        int, typer.Option(help="Training pictures that it also sees as the tokenizer draws them.")
    ] = 4096,
    decay: Decay = 0.998,
    warmup: Warmup = 100,
    seed: Seed = 0,
    device: Device = "auto",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile")] = False,
    resume: Resume = True,
    checks: Checks = 12,
    store: Store = "int8",
    limit: Limit = None,
) -> None:
    """Train a judge of drawn pictures: their labels, and features to compare them by. Needs a tokenizer."""
    from lanternpp.training.judge import JudgeSettings, train

    settings = JudgeSettings(batch_size, lr, seed, redrawn, decay=decay, warmup=warmup)
    where = plan(model / "judge", steps, minutes, device, compiled, resume, checks, store)
    leave(train(data, model, {}, settings, where, limit))
