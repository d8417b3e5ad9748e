"""Trains a target: the next code or latent of a picture, given a caption's words and those before. Needs a tokenizer.

python recipes/nature/target.py --data photos --model my-model --minutes 120
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch

from common import Crops, Data, Limit, Model, check_training, fraction, read_codes, script, tokenizer_of
from lanternpp.api.model import model_folder, read_target
from lanternpp.cli.options import verb
from lanternpp.errors import InputError
from lanternpp.models.latents import ContinuousConfig, DiffusionConfig
from lanternpp.models.vq.autoencoder import read_kl, read_vq
from lanternpp.models.words import PromptedTarget, WordsConfig, WordsTarget
from lanternpp.training.loop import run
from lanternpp.training.options import TrainingOptions
from lanternpp.training.team import team
from lanternpp.util.options import Option
from latents import ContinuousTask, DiffusionTask
from words import TargetSettings, TargetTask, vocabulary

SLOTS = 8  # words of a caption that a target reads, at least
HEADS: dict[str, tuple[Any, Any]] = {
    "softmax": (WordsConfig, TargetTask),
    "mixture": (ContinuousConfig, ContinuousTask),
    "diffusion": (DiffusionConfig, DiffusionTask),
}


@dataclass(frozen=True)
class Shape:
    """The shape of the network."""

    dim: Annotated[int, Option("Width.", ge=1)] = 384
    layers: Annotated[int, Option("Blocks.", ge=1)] = 14
    heads: Annotated[int, Option("Attention heads.", ge=1)] = 6
    hidden: Annotated[int, Option("Width inside a block's SwiGLU.", ge=1)] = 1024
    dropout: Annotated[float, fraction("Dropout inside the blocks.")] = 0.0


@dataclass(frozen=True)
class Head:
    """The head that predicts a latent."""

    components: Annotated[int | None, Option("mixture: Gaussians at every place. [default: 16]", ge=1)] = None
    denoising_steps: Annotated[
        int | None,
        Option("diffusion: steps that a latent is drawn in; 8 to 25 are usual. [default: 10]", ge=1),
    ] = None
    denoiser_width: Annotated[int | None, Option("diffusion: width of the head. [default: 256]", ge=1)] = None
    denoiser_blocks: Annotated[int | None, Option("diffusion: layers of the head. [default: 3]", ge=1)] = None

    def given(self, head: str) -> dict[str, int]:
        """The options given. InputError where one is of another head."""
        found = {name: value for name, value in asdict(self).items() if value is not None}
        for name, value in found.items():
            owner = "mixture" if name == "components" else "diffusion"
            if owner != head:
                option = name.replace("_", "-")
                raise InputError(f"--{option} {value} is of --head {owner}: leave it out.")
        return found


@verb
def main(
    *,
    data: Data,
    model: Model,
    head: Annotated[
        Literal["softmax", "mixture", "diffusion"],
        Option(
            "softmax: over codes; mixture: of Gaussians, over latents of a tokenizer of --kind kl; diffusion: over such "
            "latents too, each drawn in some denoising steps."
        ),
    ] = "softmax",
    weights_of: Annotated[
        str | None, Option("A model of the same width and depth whose weights it begins with.")
    ] = None,
    crops: Crops = 2,
    limit: Limit = None,
    shape: Shape = Shape(),
    own: Head = Head(),
    settings: TargetSettings = TargetSettings(),
    training: TrainingOptions = TrainingOptions(),
) -> bool:
    """Train a target: codes or latents from captions, one after another. Needs a trained tokenizer."""
    check_training(training, model / "target")
    if shape.dim % (4 * shape.heads):
        raise InputError(
            f"dim {shape.dim} over {shape.heads} heads: a head's channels must be a multiple of 4."
        )
    of_codes, given = head == "softmax", own.given(head)
    if settings.corrupt and not of_codes:
        raise InputError(
            f"corrupt {settings.corrupt} replaces codes, and this head reads latents: leave it out."
        )
    start: PromptedTarget | None = None
    if weights_of is not None:
        found = read_target(model_folder(weights_of), torch.float32)
        if not isinstance(found, WordsTarget if of_codes else PromptedTarget):
            what = "a model of codes" if of_codes else "a model"
            raise InputError(f"{weights_of} is not {what} that this script trains.")
        start = found
    place = tokenizer_of(model)
    vq: Any = read_vq(place) if of_codes else read_kl(place)
    fields = asdict(shape) | given
    fields |= {"vocab": vq.config.codes} if of_codes else {"channels": vq.config.dim}
    device = team().device(training.device)
    known = read_codes(data, model, crops, device, limit)
    config, task = HEADS[head]
    made = config(**fields, **vocabulary(known, SLOTS), grid=vq.config.grid)
    return run(task(made, settings, known, vq, device, start), model / "target", training)


if __name__ == "__main__":
    script(main)
