"""Trainings of targets over latents, with a mixture of Gaussians or a diffusion head at every place."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from lanternpp.engine.latents import GaussianMixture
from lanternpp.models.latents import (
    CONTINUOUS,
    DIFFUSION,
    ContinuousTarget,
    DiffusionTarget,
    LatentConfig,
    LatentTarget,
)
from lanternpp.models.vq.autoencoder import KL
from lanternpp.models.words import PromptedTarget
from losses import denoising_loss, variational_bound
from weights import begin_target, init_weights, same_codes
from words import TargetTask, code_logits

TIMES = 4  # at which a diffusion head learns from a latent in a step
FITTED = 32  # pictures by which the map of latents is fitted to that of another model
MEASURED = 4096  # training pictures whose latents give the mean and the standard deviation


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
