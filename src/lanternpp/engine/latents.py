"""Continuous latents in the decoding loop: mixtures of Gaussians, or the steps of a diffusion head, in the place of codes.

A mixture of diagonal Gaussians (GIVT, arXiv 2312.02116) is one row of P parameters, in the layout of `models/latents.py`.

A latent of a diffusion head is given by the features that the head reads: D numbers, or under guidance 2 D, the
conditional ones first. Its draw is a function of these and of T + 1 vectors of noise for T steps: the noise that the
trajectory begins with, then that of every step. Given all of this except the last step's noise, the latent follows the
Gaussian of the last step: the parameters of a mixture of one component. A mixture of one component does not depend on its
logit, in whose place is the sum of the logarithms of the standard deviations of all earlier steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Guidance, Sampling, draw
from lanternpp.errors import InputError
from lanternpp.models.latents import Denoiser, split, step_distribution


@dataclass(frozen=True)
class GaussianMixture:
    """The distributions of latents: mixtures of K Gaussians over C channels."""

    log_weight: Tensor  # [..., K], normalised
    mean: Tensor  # [..., K, C]
    log_std: Tensor  # [..., K, C]

    @classmethod
    def of(cls, params: Tensor, channels: int) -> Self:
        """Build the mixtures of parameters [..., P]."""
        logits_and_means, log_std = split(params, channels)
        shape = (log_std.shape[-1] // channels, channels)  # K, C
        logits, mean = logits_and_means.tensor_split((shape[0],), -1)
        return cls(logits.log_softmax(-1), mean.unflatten(-1, shape), log_std.unflatten(-1, shape))

    def log_prob(self, latents: Tensor) -> Tensor:
        """Return the logarithm of the density at latents [..., C], [...], in nats."""
        z = (latents[..., None, :] - self.mean) * (-self.log_std).exp()  # [..., K, C]
        # the negative logarithm of every component's density, [..., K]
        nats = (z.square() / 2 + self.log_std).sum(-1) + self.mean.shape[-1] / 2 * math.log(2 * math.pi)
        return (self.log_weight - nats).logsumexp(-1)

    def draw(self, u: Tensor) -> Tensor:
        """Draw latents [..., M, C] by uniform u [..., M, 1 + C]; the first number chooses the component."""
        component = draw(self.log_weight.exp(), u[..., 0])[..., None]  # [..., M, 1]
        component = component.expand(*u.shape[:-1], self.mean.shape[-1])
        std = self.log_std.exp().gather(-2, component)
        return self.mean.gather(-2, component) + std * torch.special.ndtri(u[..., 1:])


@dataclass(frozen=True)
class MixtureSampling(Sampling):
    """How latents are drawn from mixtures. `temperature` multiplies every standard deviation.

    Raises InputError for temperature 0, which has no density, and for top-k and top-p, which are for codes.
    """

    channels: int = 1  # C

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.greedy:
            raise InputError(
                "temperature 0 leaves a continuous latent without a density; use one above 0, such as 0.5"
            )
        for name, value, default in (("top-k", self.top_k, 0), ("top-p", self.top_p, 1)):
            if value != default:
                raise InputError(f"{name} {value} is for codes, and this model draws latents; leave it out")

    def probs(self, logits: Tensor) -> Tensor:
        """Apply the temperature to guided parameters [..., P]: [..., P] float64."""
        logits_and_means, log_std = split(logits.double(), self.channels)
        return torch.cat((logits_and_means, log_std + math.log(self.temperature)), -1)

    def mixtures(self, logits: Tensor, noise: Noise) -> Tensor:
        """Return the parameters [B, N, P] of the latents after the nodes of a chain that was drawn from this noise; logits [B, N, ...]."""
        return self.probs(logits)

    def children(self, q: Tensor, count: int, noise: Noise, purpose: int) -> Tensor:
        """Draw latents [B, W, count, C] from parameters q [B, W, P], independently, in trial order."""
        u = noise.fine(purpose, q.shape[1], count, 1 + self.channels)
        return GaussianMixture.of(q, self.channels).draw(u).float()

    def draw(self, probs: Tensor, noise: Noise) -> Tensor:
        """Draw a latent per sample, [B, C], from parameters [B, P]."""
        return self.children(probs[:, None], 1, noise, Noise.BONUS)[:, 0, 0]


@dataclass(frozen=True)
class MixtureGuidance(Guidance):
    """Classifier-free guidance that yields a mixture again, so that its density is in closed form.

    Logits and means are extrapolated from the unconditional row through the conditional row; the standard deviations are
    the conditional row's. For one component and equal standard deviations the mixture is the usual guided distribution, the
    density proportional to p_c^s p_u^(1 - s) for the scale s; each of several components is guided by itself. Drafts are
    verified against the guided distribution.
    """

    channels: int = 1  # C

    def merge(self, logits: Tensor) -> Tensor:
        """Guide parameters [R, ..., P]: [B, ..., P] in float32 (float64 stays), before temperature."""
        merged = super().merge(logits)
        if self.branches == 1:
            return merged
        log_std = split(logits.chunk(2)[0].to(merged.dtype), self.channels)[1]
        return torch.cat((split(merged, self.channels)[0], log_std), -1)


@dataclass(frozen=True)
class DiffusionGuidance(Guidance):
    """Keeps the features of both branches, as guidance is within every step: `DiffusionSampling` has the scale."""

    def merge(self, logits: Tensor) -> Tensor:
        """Join the branches of features [R, ..., D]: [B, ..., branches D] in float32 (float64 stays)."""
        features = logits if logits.element_size() == 8 else logits.float()
        return torch.cat(features.chunk(self.branches), -1)


@dataclass(frozen=True)
class DiffusionSampling(MixtureSampling):
    """How latents are drawn by the network `denoiser`. `temperature` multiplies the standard deviation of every step.

    Under guidance of scale s the predicted v is u + s (c - u), for the conditional c and the unconditional u, which is the
    usual guidance of the noise (arXiv 2207.12598); standard deviations are the conditional ones.
    """

    denoiser: Denoiser = field(kw_only=True, repr=False)
    steps: int = 1  # T
    scale: float = 1.0

    def probs(self, logits: Tensor) -> Tensor:
        """Return features [..., branches D] unchanged."""
        return logits

    def mixtures(self, logits: Tensor, noise: Noise) -> Tensor:
        """Return the Gaussians of the last steps, [B, N, 1 + 2 C], for features [B, N, branches D]."""
        trajectory_noise = [self.noise(noise, Noise.DRAFT + level) for level in range(logits.shape[1])]
        return self.last_step(logits, torch.stack(trajectory_noise, 1))

    def noise(self, noise: Noise, purpose: int, *shape: int) -> Tensor:
        """Return the noise of trajectories, [B, *shape, T + 1, C] float32, or float64 where the network is."""
        u = noise.fine(purpose, *shape, self.steps + 1, self.channels)
        dtype = torch.promote_types(self.denoiser.inputs.bias.dtype, torch.float32)
        return torch.special.ndtri(u).to(dtype)

    def children(self, q: Tensor, count: int, noise: Noise, purpose: int) -> Tensor:
        """Draw latents [B, W, count, C] from features q [B, W, branches D], independently, in trial order."""
        trajectory_noise = self.noise(noise, purpose, q.shape[1], count)
        return self.end(self.last_step(q[:, :, None], trajectory_noise), trajectory_noise)

    def end(self, last: Tensor, noise: Tensor) -> Tensor:
        """Return latents [..., C] of last steps' Gaussians, last [..., 1 + 2 C], and trajectories' noise [..., T + 1, C]."""
        mean, log_std = last[..., 1:].chunk(2, -1)
        return (mean + log_std.exp() * noise[..., -1, :]).float()

    def last_step(self, features: Tensor, noise: Tensor) -> Tensor:
        """Return the Gaussian of the last step, [..., 1 + 2 C] float64.

        features [..., branches D] broadcast to noise [..., T + 1, C], whose last vector is not read.
        """
        conditions = self.denoiser.conditions(features.unflatten(-1, (-1, self.denoiser.dim)))
        x = noise[..., 0, :]  # x_T, [..., C]
        log_width = torch.zeros_like(x[..., 0])
        for step in range(self.steps, 0, -1):
            t = step / self.steps
            v, log_std = self.denoiser(x[..., None, :], x.new_full((), t), conditions)  # [..., branches, C]
            guided = v[..., 0, :] if v.shape[-2] == 1 else v[..., 1, :].lerp(v[..., 0, :], self.scale)
            mean, std = step_distribution(x, guided, log_std[..., 0, :], t, (step - 1) / self.steps)
            std = std * self.temperature
            if step > 1:
                log_width = log_width + std.log().sum(-1)
                x = mean + std * noise[..., self.steps - step + 1, :]
        return torch.cat((log_width[..., None].double(), mean.double(), std.double().log()), -1)
