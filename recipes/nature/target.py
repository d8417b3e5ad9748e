"""Trains a target: the next code or latent of a picture, given a caption's words and those before. Needs a tokenizer.

python recipes/nature/target.py --data photos --model my-model --minutes 120
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from common import Crops, Data, Limit, Model, check_training, fraction, read_codes, script, tokenizer_of
from lanternpp.api.model import model_folder, read_target
from lanternpp.cli.options import verb
from lanternpp.engine.latents import GaussianMixture
from lanternpp.errors import InputError
from lanternpp.models.latents import (
    CONTINUOUS,
    DIFFUSION,
    ContinuousTarget,
    DiffusionTarget,
    LatentConfig,
    LatentTarget,
)
from lanternpp.models.vq.autoencoder import KL, read_kl, read_vq
from lanternpp.models.words import PromptedTarget, WordsTarget
from lanternpp.training.loop import run
from lanternpp.training.options import TrainingOptions, check_kind
from lanternpp.training.team import team
from lanternpp.util.options import Option
from losses import denoising_loss, variational_bound
from weights import begin_target, init_weights, same_codes
from words import TargetSettings, TargetTask, code_logits, vocabulary

SLOTS = 8  # words of a caption that a target reads, at least
TIMES = 4  # at which a diffusion head learns from a latent in a step
FITTED = 32  # pictures by which the map of latents is fitted to that of another model
MEASURED = 4096  # training pictures whose latents give the mean and the standard deviation
Mixture, Diffusion = partial(Option, group="Mixture"), partial(Option, group="Diffusion")


@dataclass(frozen=True)
class Shape:
    """The shape of the network, and of the head that predicts a latent."""

    dim: Annotated[int, Option("Width.", ge=1)] = 384
    layers: Annotated[int, Option("Blocks.", ge=1)] = 14
    heads: Annotated[int, Option("Attention heads.", ge=1)] = 6
    hidden: Annotated[int, Option("Width inside a block's SwiGLU.", ge=1)] = 1024
    dropout: Annotated[float, fraction("Dropout inside the blocks.")] = 0.0
    components: Annotated[int, Mixture("Gaussians at every place.", ge=1, le=1024)] = 16
    denoising_steps: Annotated[
        int, Diffusion("Steps that a latent is drawn in; 8 to 25 are usual.", ge=1, le=1000)
    ] = 10
    denoiser_width: Annotated[int, Diffusion("Width of the head.", ge=1)] = 256
    denoiser_blocks: Annotated[int, Diffusion("Layers of the head.", ge=1, le=64)] = 3


class LatentTask(TargetTask):
    """A target on cached moments of latents, which are drawn anew in every step."""

    vq: KL
    target: type[LatentTarget]
    model: LatentTarget

    def make(self) -> LatentTarget:
        """The target, with first weights, and the mean and the standard deviation of the latents of training pictures."""
        assert isinstance(self.config, LatentConfig)
        model = self.target(self.config, self.vq)
        init_weights(model)
        mean, log_var = self.codes.train.codes[:MEASURED, 0].float().flatten(0, 1).chunk(2, -1)
        model.latent_mean.copy_(mean.mean(0))
        model.latent_std.copy_((mean.var(0) + log_var.exp().mean(0)).sqrt())
        return model

    @torch.no_grad()
    def begin(self, model: PromptedTarget, start: PromptedTarget) -> str:
        """As in the base class. Where the other model has other codes or latents, the map of latents for the input is fitted, by least
        squares, to the vectors that the other model reads of the same pictures: its layers are of use from the first step on."""
        said, mine, theirs = begin_target(model, start), self.vq.config, start.vq.config
        if same_codes(model, start) or (mine.size, mine.grid) != (theirs.size, theirs.grid):
            return said
        assert isinstance(model, LatentTarget)
        generator = torch.Generator().manual_seed(0)
        moments = self.codes.train.codes[:: -(-len(self.codes.train) // FITTED), 0].float()
        latents = model.from_cache(moments, generator).flatten(0, 1)
        images = self.vq.decode(moments.chunk(2, -1)[0].to(self.device)).cpu()
        vectors = start.embed(start.from_cache(start.vq.encode(images), generator)).flatten(0, 1)
        fit = torch.linalg.lstsq(torch.cat((latents, torch.ones_like(latents[:, :1])), 1), vectors).solution
        model.latent_in.weight.copy_(fit[:-1].T)
        model.latent_in.bias.copy_(fit[-1])
        return f"{said}; latent_in is fitted to the vectors that the other model reads of {len(moments)} pictures"

    def simplest(self) -> dict[str, float]:
        """Nats per number under one Gaussian for all places: what context must beat."""
        return {"gaussian": (math.log(2 * math.pi) + 1) / 2}

    def loss(self, words: Tensor, null: Tensor, input_codes: Tensor, codes: Tensor) -> Tensor:
        """The mean of `cost`: words [B, T], null [B] bool, latents twice [B, length, C]."""
        return self.cost(code_logits(self.model, words, null, input_codes, self.dtype), codes).mean()

    @abstractmethod
    def nats(self, params: Tensor, latents: Tensor) -> Tensor:
        """Output of the average's head [B, length, P], latents [B, length, C] -> nats per number, [B, length]."""

    def cost(self, params: Tensor, latents: Tensor) -> Tensor:
        """The loss of the model, from the same, [B, length]; nats unless a head learns by something else."""
        return self.nats(params, latents)

    def validate_on(self, index: Tensor) -> dict[str, float]:
        """Nats per number of the average on validation pictures [M], captions given, no guidance."""
        every = [self.nats(params, latents).flatten() for latents, params in self.predicted(index)]
        return {"nll": torch.cat(every).mean().item(), **self.baseline}


class ContinuousTask(LatentTask):
    """A target with a mixture of Gaussians at every place."""

    kind = CONTINUOUS
    target = ContinuousTarget

    def make(self) -> ContinuousTarget:
        """As in the base class; the components begin at random places."""
        model = super().make()
        assert isinstance(model, ContinuousTarget)
        config = model.config
        nn.init.normal_(model.latent_out.weight, std=0.02)
        means = slice(config.components, config.components * (1 + config.channels))
        with torch.no_grad():
            model.latent_out.bias.zero_()[means].normal_()
        return model

    def nats(self, params: Tensor, latents: Tensor) -> Tensor:
        """-log of the density, of parameters of mixtures."""
        channels = latents.shape[-1]
        return -GaussianMixture.of(params.float(), channels).log_prob(latents.float()) / channels


class DiffusionTask(LatentTask):
    """A target with a diffusion head."""

    kind = DIFFUSION
    target = DiffusionTarget
    model: DiffusionTarget
    average: DiffusionTarget

    def nats(self, params: Tensor, latents: Tensor) -> Tensor:
        """The variational bound for as many steps as it draws with, of features; the same noise every time."""
        generator = torch.Generator().manual_seed(0)
        steps = self.average.config.denoising_steps
        return variational_bound(self.average.denoiser, params, latents, steps, generator)

    def cost(self, params: Tensor, latents: Tensor) -> Tensor:
        """The denoising loss."""
        return denoising_loss(self.model.denoiser, params, latents, TIMES)


HEADS: dict[str, type[TargetTask]] = {
    "softmax": TargetTask,
    "mixture": ContinuousTask,
    "diffusion": DiffusionTask,
}


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
    settings: TargetSettings = TargetSettings(),
    training: TrainingOptions = TrainingOptions(),
) -> bool:
    """Train a target: codes or latents from captions, one after another. Needs a trained tokenizer."""
    check_training(training, model / "target")
    if shape.dim % (4 * shape.heads):
        raise InputError(
            f"dim {shape.dim} over {shape.heads} heads: a head's channels must be a multiple of 4."
        )
    for options in (shape, settings):
        check_kind(options, head, "--head")
    of_codes, task = head == "softmax", HEADS[head]
    config: Any = task.target.config_class
    start: Any = None if weights_of is None else read_target(model_folder(weights_of), torch.float32)
    if start is not None and not isinstance(start, WordsTarget if of_codes else PromptedTarget):
        what = "a model of codes" if of_codes else "a model"
        raise InputError(f"{weights_of} is not {what} that this script trains.")
    place = tokenizer_of(model)
    vq: Any = read_vq(place) if of_codes else read_kl(place)
    fields = {name: value for name, value in vars(shape).items() if name in config.__dataclass_fields__}
    fields |= {"vocab": vq.config.codes} if of_codes else {"channels": vq.config.dim}
    device = team().device(training.device)
    known = read_codes(data, model, crops, device, limit)
    made = config(**fields, **vocabulary(known, SLOTS), grid=vq.config.grid)
    return run(task(made, settings, known, vq, device, start), model / "target", training)


if __name__ == "__main__":
    script(main)
