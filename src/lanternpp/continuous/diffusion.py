"""Latents drawn by a diffusion head: guidance, sampling, the target and its drafter.

What stands for a latent's law are the features that the head reads: D numbers, or under guidance 2 D, the conditional ones first.
The draw of a latent is a function of these and of T + 1 vectors of noise for T steps: the noise that the trajectory begins with,
then that of every step. Given all of this but the last step's, the latent's law is the Gaussian of the last step: the parameters of a mixture
of one component. Its logit, of which that law does not depend, has the sum of the logarithms of the standard deviations of all earlier steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from torch import Tensor

from lanternpp.continuous.denoiser import Denoiser, step_distribution
from lanternpp.continuous.mixture import MixtureSampling
from lanternpp.continuous.target import LatentConfig, LatentTarget
from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.noise import Noise
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn.configs import Width
from lanternpp.nn.sources import Source
from lanternpp.util.schema import Between

KIND, DRAFTER = "diffusion", "eagle-diffusion"  # a config's `kind`
DenoiserBlocks = Annotated[int, Between(1, 64)]
DenoisingSteps = Annotated[int, Between(1, 1000)]


@dataclass(frozen=True)
class DiffusionGuidance(Guidance):
    """Keeps the features of both branches, as guidance is within every step: `DiffusionSampling` has the scale."""

    def merge(self, logits: Tensor) -> Tensor:
        """Features [R, ..., D] -> [B, ..., branches D] in float32 (float64 stays)."""
        features = logits if logits.element_size() == 8 else logits.float()
        return torch.cat(features.chunk(self.branches), -1)


@dataclass(frozen=True)
class DiffusionSampling(MixtureSampling):
    """What latents are drawn from, by the network `denoiser`. `temperature` multiplies the standard deviation of every step.

    Under guidance of scale s the predicted v is u + s (c - u), for the conditional c and the unconditional u, which is the
    usual guidance of the noise (arXiv 2207.12598); standard deviations are the conditional ones.
    """

    denoiser: Denoiser = field(kw_only=True, repr=False)
    steps: int = 1  # T
    scale: float = 1.0

    def probs(self, logits: Tensor) -> Tensor:
        """Features [..., branches D] stay as they are."""
        return logits

    def noise(self, noise: Noise, purpose: int, *shape: int) -> Tensor:
        """The noise of trajectories, [B, *shape, T + 1, C] float32, or float64 where the network is."""
        u = noise.fine(purpose, *shape, self.steps + 1, self.channels)
        kind = self.denoiser.inputs.bias.dtype
        return torch.special.ndtri(u).to(torch.float64 if kind == torch.float64 else torch.float32)

    def children(self, q: Tensor, count: int, noise: Noise, purpose: int) -> Tensor:
        """Features [B, W, branches D] -> latents [B, W, count, C], independent draws in trial order."""
        every = self.noise(noise, purpose, q.shape[1], count)
        return self.end(self.last_step(q[:, :, None], every), every)

    def end(self, last: Tensor, noise: Tensor) -> Tensor:
        """The Gaussians of last steps [..., 1 + 2 C] and the noise of their trajectories [..., T + 1, C] -> latents [..., C]."""
        mean, log_std = last[..., 1:].chunk(2, -1)
        return (mean + log_std.exp() * noise[..., -1, :]).float()

    def last_step(self, law: Tensor, noise: Tensor) -> Tensor:
        """Features [..., branches D], which broadcast, and noise [..., T + 1, C], the last of which is not read -> the Gaussian of the
        last step, [..., 1 + 2 C] float64."""
        conditions = self.denoiser.conditions(law.unflatten(-1, (-1, self.denoiser.dim)))
        x = noise[..., 0, :]
        log_width = torch.zeros_like(x[..., 0])
        for step in range(self.steps, 0, -1):
            t = step / self.steps
            v, log_std = self.denoiser(x[..., None, :], x.new_full((), t), conditions)
            guided = v[..., 0, :] if v.shape[-2] == 1 else v[..., 1, :].lerp(v[..., 0, :], self.scale)
            mean, std = step_distribution(x, guided, log_std[..., 0, :], t, (step - 1) / self.steps)
            std = std * self.temperature
            if step > 1:
                log_width = log_width + std.log().sum(-1)
                x = mean + std * noise[..., self.steps - step + 1, :]
        return torch.cat((log_width[..., None].double(), mean.double(), std.double().log()), -1)


@dataclass(frozen=True)
class DiffusionConfig(LatentConfig):
    """The shape of a target with a diffusion head."""

    denoiser_width: Width = 256
    denoiser_blocks: DenoiserBlocks = 3
    denoising_steps: DenoisingSteps = 10  # T


class DiffusionTarget(LatentTarget):
    """A causal decoder whose head draws a latent in `denoising_steps` steps; its `head` gives the features that they read."""

    config_class = DiffusionConfig
    config: DiffusionConfig

    def add_tables(self) -> None:
        """The map of latents for the input, and the head."""
        super().add_tables()
        config = self.config
        self.denoiser = Denoiser(config.dim, config.channels, config.denoiser_width, config.denoiser_blocks)

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """As the base class reads it; the head computes in float32 at least, so that rounding does not depend on the batch."""
        target = super().read(source, dtype, device)
        target.denoiser.to(torch.promote_types(dtype, torch.float32))
        return target

    def head(self, features: Tensor) -> Tensor:
        """The features themselves."""
        return features


@dataclass(frozen=True)
class DiffusionDrafterConfig(EagleConfig):
    """The shape of an EAGLE drafter with a diffusion head of its own."""

    channels: Width = 16  # C
    denoiser_width: Width = 128
    denoiser_blocks: DenoiserBlocks = 1


class DiffusionDrafter(EagleDrafter):
    """EAGLE's drafter, with a smaller diffusion head that reads the features that it predicts."""

    config_class = DiffusionDrafterConfig
    proposer = "lanternpp.continuous.trajectories:TrajectoryProposer"
    config: DiffusionDrafterConfig

    def __init__(self, config: DiffusionDrafterConfig, rotary_table: Tensor):
        super().__init__(config, rotary_table)
        self.denoiser = Denoiser(
            config.decoder.dim, config.channels, config.denoiser_width, config.denoiser_blocks
        )

    @classmethod
    def read(cls, source: Source, target: Target, dtype: torch.dtype) -> Self:
        """As the base class reads it, the head as the target's. InputError where that has none, or other latents."""
        drafter = super().read(source, target, dtype)
        check_pair(target, drafter, source.path)
        drafter.denoiser.to(torch.promote_types(dtype, torch.float32))
        return drafter


def check_pair(target: Target, drafter: Any, named: Path | str = "the drafter") -> None:
    """InputError unless both a target and its drafter have diffusion heads, over latents of the same size."""
    heads = isinstance(target, DiffusionTarget), isinstance(drafter, DiffusionDrafter)
    if not all(heads):
        having = "has a diffusion head, which this model has not" if heads[1] else "has no diffusion head"
        raise InputError(f"{named} {having}; use a drafter that `lanternpp train` trained for this model")
    if drafter.config.channels != target.channels:
        raise InputError(
            f"{named} draws latents of {drafter.config.channels} channels and the target of {target.channels}; use a "
            "drafter trained for this target"
        )
