"""`lanternpp train`: the tokenizer, the target and the classifier of a model; its drafters are in `train_drafter`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lanternpp.cli.options import bundled
from lanternpp.cli.output import writable_folder

if TYPE_CHECKING:
    from lanternpp.training.run import TrainingOptions

Planned = Callable[..., "TrainingOptions"]
app = typer.Typer(no_args_is_help=True)

Data = Annotated[Path, typer.Option(help="Imagefolder with train/ and val/, each with metadata.jsonl.")]
Model = Annotated[Path, typer.Option(help="Model folder to write to.")]
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


@app.callback()
def main() -> None:
    """Train a model's tokenizer, target, drafter and classifier; each run resumes where it stopped."""


@app.command()
@plans(20)
def tokenizer(
    data: Data,
    model: Model,
    kind: Annotated[
        Literal["vq", "kl"],
        typer.Option(
            help="vq: codes of a codebook; kl: continuous latents, for a target with --head mixture or diffusion."
        ),
    ] = "vq",
    size: Annotated[
        int | None, typer.Option(help="Pixels of an image's side. [default: 128, or that of --codes-of]")
    ] = None,
    down: Annotated[
        int | None, typer.Option(help="Pixels of a side per code or latent: 4, 8 or 16. [default: 8]")
    ] = None,
    codes: Annotated[int | None, typer.Option(help="vq: entries of the codebook. [default: 4096]")] = None,
    channels: Annotated[int | None, typer.Option(help="kl: numbers of a latent. [default: 16]")] = None,
    codes_of: Annotated[
        str | None, typer.Option(help="A model whose codes are kept: only its decoder is trained further.")
    ] = None,
    weights_of: Annotated[
        str | None,
        typer.Option(
            help="A model with stages of the same shape whose weights it begins with, of either kind."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Pictures a step.")] = 32,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 5e-4,
    adversarial: Annotated[bool, typer.Option(help="Sharpen the decoder against a discriminator.")] = True,
    adversarial_start: Annotated[float, typer.Option(help="Share of the budget before that.")] = 0.5,
    adversarial_weight: Annotated[
        float, typer.Option(help="Its gradient, in lengths of the reconstruction's.")
    ] = 0.3,
    perceptual: Annotated[
        float, typer.Option(help="Weight of the distance in the features of a classifier.")
    ] = 0.1,
    classifier_of: Annotated[str, typer.Option(help="The model whose classifier that is.")] = "nature-128",
    seed: Seed = 0,
    limit: Limit = None,
    *,
    plan: Planned,
) -> None:
    """Train the tokenizer: pictures <-> codes, or latents."""
    from dataclasses import replace

    from lanternpp.api.model import model_folder
    from lanternpp.errors import InputError
    from lanternpp.models.vq.folder import read_vq
    from lanternpp.models.vq.kl import KLConfig
    from lanternpp.models.vq.model import Stacks, VQConfig, stages
    from lanternpp.training.kl import KLTask
    from lanternpp.training.material.codes import tokenizer_of
    from lanternpp.training.tokenizer import TokenizerSettings, TokenizerTask, train

    if codes_of is not None and not (down is codes is None):
        raise InputError("--down and --codes are those of --codes-of's model; leave them out.")
    if codes_of is not None and weights_of is not None:
        raise InputError(
            "--codes-of keeps all weights of its model but the decoder's: leave --weights-of out."
        )
    shape = stages(8 if down is None else down)
    config: Stacks
    task: type[TokenizerTask] | None = None
    if kind == "kl":
        if codes is not None or codes_of is not None:
            raise InputError("--codes and --codes-of are of tokenizers of --kind vq: leave them out.")
        config, task = KLConfig(size or 128, 16 if channels is None else channels, **shape), KLTask
    elif channels is not None:
        raise InputError(f"--channels {channels} is of tokenizers of --kind kl: leave it out.")
    elif codes_of is None:
        config = VQConfig(size or 128, codes or 4096, **shape)
    else:
        known = read_vq(tokenizer_of(model_folder(codes_of))).config
        config = known if size is None else replace(known, size=size)
    settings = TokenizerSettings(
        batch_size, lr, seed, adversarial, adversarial_start, adversarial_weight, perceptual=perceptual
    )
    where = plan(model / "tokenizer")
    kept = None if codes_of is None else model_folder(codes_of)
    start = None if weights_of is None else model_folder(weights_of)
    judged = model_folder(classifier_of) if perceptual else None
    leave(train(data, model, config, settings, where, limit, kept, start, judged, task))


@app.command()
@plans(12)
def target(
    data: Data,
    model: Model,
    head: Annotated[
        Literal["softmax", "mixture", "diffusion"],
        typer.Option(
            help="softmax: over codes; mixture: of Gaussians, over latents of a tokenizer of --kind kl; diffusion: over such "
            "latents too, each drawn in some denoising steps."
        ),
    ] = "softmax",
    components: Annotated[
        int | None, typer.Option(help="mixture: Gaussians at every place. [default: 16]")
    ] = None,
    denoising_steps: Annotated[
        int | None,
        typer.Option(help="diffusion: steps that a latent is drawn in; 8 to 25 are usual. [default: 10]"),
    ] = None,
    denoiser_width: Annotated[
        int | None, typer.Option(help="diffusion: width of the head. [default: 256]")
    ] = None,
    denoiser_blocks: Annotated[
        int | None, typer.Option(help="diffusion: layers of the head. [default: 3]")
    ] = None,
    dim: Annotated[int, typer.Option(help="Width.")] = 384,
    layers: Annotated[int, typer.Option(help="Blocks.")] = 14,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 6,
    hidden: Annotated[int, typer.Option(help="Width inside a block's SwiGLU.")] = 1024,
    weights_of: Annotated[
        str | None, typer.Option(help="A model of the same width and depth whose weights it begins with.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Pictures a step.")] = 32,
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
    limit: Limit = None,
    *,
    plan: Planned,
) -> None:
    """Train the target: codes or latents from captions, one after another. Needs a trained tokenizer."""
    from lanternpp.api.model import model_folder
    from lanternpp.errors import InputError
    from lanternpp.training import continuous
    from lanternpp.training.target import TargetSettings, train

    settings = TargetSettings(batch_size, lr, muon_lr, seed, corrupt, decay=decay, warmup=warmup, cfg=cfg)
    shape = {"dim": dim, "layers": layers, "heads": heads, "hidden": hidden, "dropout": dropout}
    where = plan(model / "target")
    of_mixture = {"components": components}
    of_diffusion = {
        "denoising_steps": denoising_steps,
        "denoiser_width": denoiser_width,
        "denoiser_blocks": denoiser_blocks,
    }
    own: dict[str, int] = {}
    for name, options in (("mixture", of_mixture), ("diffusion", of_diffusion)):
        given = {option: value for option, value in options.items() if value is not None}
        if given and head != name:
            option, value = next(iter(given.items()))
            raise InputError(f"--{option.replace('_', '-')} {value} is of --head {name}: leave it out.")
        own |= given
    start = None if weights_of is None else model_folder(weights_of)
    if head != "softmax":
        diffusion = head == "diffusion"
        leave(continuous.train(data, model, shape, settings, where, crops, limit, diffusion, start, **own))
        return
    leave(train(data, model, shape, settings, where, crops, limit, start))


@app.command()
@plans(12, "int8")
def classifier(
    data: Data,
    model: Model,
    batch_size: Annotated[int, typer.Option(help="Pictures a step.")] = 64,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    redrawn: Annotated[
        int, typer.Option(help="Training pictures that it also sees as the tokenizer draws them.")
    ] = 4096,
    decay: Decay = 0.998,
    warmup: Warmup = 100,
    seed: Seed = 0,
    limit: Limit = None,
    *,
    plan: Planned,
) -> None:
    """Train a classifier of drawn pictures: it names their labels and gives features to compare them by. Needs a tokenizer."""
    from lanternpp.training.classifier import ClassifierSettings, train

    settings = ClassifierSettings(batch_size, lr, seed, redrawn, decay=decay, warmup=warmup)
    where = plan(model / "classifier")
    leave(train(data, model, {}, settings, where, limit))
