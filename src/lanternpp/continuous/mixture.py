"""Mixtures of diagonal Gaussians, the law of a latent (GIVT, arXiv 2312.02116): densities, draws, guidance.

A mixture of K components over C channels is one row of P = K (1 + 2 C) parameters: K logits of the weights, then
K x C means, then K x C logarithms of standard deviations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lanternpp.engine.guidance import Guidance
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling, draw
from lanternpp.errors import InputError

MOST = 5.0  # of the logarithm of a standard deviation, above and below 0


def size(components: int, channels: int) -> int:
    """The parameters P of a mixture."""
    return components * (1 + 2 * channels)


def split(params: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Parameters [..., P] -> (logits and means, log standard deviations [..., K C])."""
    own = params.shape[-1] // (1 + 2 * channels) * channels
    return params[..., :-own], params[..., -own:]


def bounded(params: Tensor, channels: int) -> Tensor:
    """A network's output [..., P] as parameters: no logarithm of a standard deviation is beyond `MOST` either way."""
    rest, log_std = split(params, channels)
    return torch.cat((rest, MOST * (log_std / MOST).tanh()), -1)


@dataclass(frozen=True)
class GaussianMixture:
    """The law of one latent, or of many."""

    log_weight: Tensor  # [..., K], normalised
    mean: Tensor  # [..., K, C]
    log_std: Tensor  # [..., K, C]

    @classmethod
    def of(cls, params: Tensor, channels: int) -> Self:
        """From parameters [..., P]."""
        rest, log_std = split(params, channels)
        components = log_std.shape[-1] // channels
        shape = (components, channels)
        means = rest[..., components:].unflatten(-1, shape)
        return cls(rest[..., :components].log_softmax(-1), means, log_std.unflatten(-1, shape))

    def log_prob(self, latents: Tensor) -> Tensor:
        """The logarithm of the density at latents [..., C], [...], in nats."""
        offset = (latents[..., None, :] - self.mean) * (-self.log_std).exp()
        each = (offset.square() / 2 + self.log_std).sum(-1) + self.mean.shape[-1] / 2 * math.log(2 * math.pi)
        return (self.log_weight - each).logsumexp(-1)

    def draw(self, u: Tensor) -> Tensor:
        """Latents at uniform numbers u [..., M, 1 + C], the first of which chooses the component: [..., M, C]."""
        chosen = draw(self.log_weight.exp(), u[..., 0])[..., None].expand(*u.shape[:-1], self.mean.shape[-1])
        std = self.log_std.exp().gather(-2, chosen)
        return self.mean.gather(-2, chosen) + std * torch.special.ndtri(u[..., 1:])


@dataclass(frozen=True)
class MixtureSampling(Sampling):
    """What latents are drawn from. `temperature` multiplies every standard deviation.

    Raises InputError for temperature 0, which has no density, and for top-k and top-p, which are of codes.
    """

    channels: int = 1  # C

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.greedy:
            raise InputError(
                "temperature 0 leaves a continuous latent without a density; use one above 0, such as 0.5"
            )
        for name, value, off in (("top-k", self.top_k, 0), ("top-p", self.top_p, 1)):
            if value != off:
                raise InputError(f"{name} {value} is for codes, and this model draws latents; leave it out")

    def probs(self, logits: Tensor) -> Tensor:
        """Guided parameters [..., P] -> those of the law that latents are drawn from, [..., P] float64."""
        rest, log_std = split(logits.double(), self.channels)
        return torch.cat((rest, log_std + math.log(self.temperature)), -1)

    def children(self, q: Tensor, count: int, noise: Noise, purpose: int) -> Tensor:
        """Parameters [B, W, P] -> latents [B, W, count, C], independent draws in trial order."""
        u = noise.fine(purpose, q.shape[1], count, 1 + self.channels)
        return GaussianMixture.of(q, self.channels).draw(u).float()

    def draw(self, probs: Tensor, noise: Noise) -> Tensor:
        """Parameters [B, P] -> a latent per sample, [B, C]."""
        return self.children(probs[:, None], 1, noise, Noise.BONUS)[:, 0, 0]


@dataclass(frozen=True)
class MixtureGuidance(Guidance):
    """Classifier-free guidance whose law is a mixture again, so that its density is in closed form.

    Logits and means are extrapolated from the unconditional row's through the conditional row's; the standard deviations
    are those of the conditional row. For one component and equal standard deviations this is the usual law, the density
    proportional to p_c^s p_u^(1 - s) for the scale s; for several components it is that law of each by itself. The guided
    law is what drafts are verified against.
    """

    channels: int = 1  # C

    def merge(self, logits: Tensor) -> Tensor:
        """Parameters [R, ..., P] -> [B, ..., P] in float32 (float64 stays), before temperature."""
        merged = super().merge(logits)
        if self.branches == 1:
            return merged
        own = split(logits.chunk(2)[0].to(merged.dtype), self.channels)[1]
        return torch.cat((split(merged, self.channels)[0], own), -1)
