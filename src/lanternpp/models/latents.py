"""Targets over the latents of a KL autoencoder, with a mixture of Gaussians or a diffusion head at every place.

A mixture (GIVT, arXiv 2312.02116) of K components over C channels is one row of P = K (1 + 2 C) parameters: K logits of the weights,
then K x C means, then K x C logarithms of standard deviations.

A diffusion head draws a latent as the end of a short chain of Gaussian steps (MAR, 2406.11838, section 3.2). A small network reads a
noisy latent, the time, and the decoder's feature at the place, which is its condition. At time t, 0 < t <= 1, a noisy latent is
x_t = cos(t pi / 2) x_0 + sin(t pi / 2) e for noise e of variance 1, so that x_1 is noise alone (the cosine schedule of 2102.09672).
The network predicts v = cos(t pi / 2) e - sin(t pi / 2) x_0 (2202.00512), which gives x_0, and the standard deviation of its error,
per channel. A step from t to an earlier s draws from the Gaussian with the mean and variance of x_s: those of x_s for a known x_0,
plus the error of x_0 (2206.07309). So few steps suffice, the last step has a density, and where x_0 is Gaussian any number of steps
gives its exact distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.models.vq.autoencoder import KL, sampled
from lanternpp.models.words import PromptedConfig, PromptedTarget
from lanternpp.nn.checkpoints import Width
from lanternpp.nn.sources import Source
from lanternpp.util.jsonfile import Between

CONTINUOUS, DIFFUSION = "continuous", "diffusion"  # a config's `kind`
FREQUENCIES = 16  # of the time, from 1 to 256 radians
MAX_LOG_STD = 5.0  # of a component of a mixture or of an error, above and below 0


def bounded(log_std: Tensor) -> Tensor:
    """Logarithms of standard deviations within `MAX_LOG_STD`."""
    return MAX_LOG_STD * (log_std / MAX_LOG_STD).tanh()


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x [..., W], normalised over its channels, scaled and shifted as the condition says (adaptive norm, arXiv 2212.09748)."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


class DenoiserBlock(nn.Module):
    """A residual layer, which begins as the identity."""

    def __init__(self, width: int):
        super().__init__()
        self.modulation = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """x [..., W] -> [..., W]; context [..., W] is of the time and the condition."""
        shift, scale, gate = self.modulation(context).chunk(3, -1)
        inner: Tensor = self.down(F.silu(self.up(modulated(x, shift, scale))))
        return x + gate * inner


class Denoiser(nn.Module):
    """Predicts v and the logarithm of its error's standard deviation. It begins with v = 0 and errors of 1."""

    def __init__(self, dim: int, channels: int, width: int, blocks: int):
        super().__init__()
        self.dim = dim
        self.inputs, self.condition = nn.Linear(channels, width), nn.Linear(dim, width)
        self.time = nn.Sequential(nn.Linear(2 * FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DenoiserBlock(width) for _ in range(blocks))
        self.modulation, self.outputs = nn.Linear(width, 2 * width), nn.Linear(width, 2 * channels)
        for layer in (self.modulation, self.outputs):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def conditions(self, features: Tensor) -> Tensor:
        """Features [..., D] -> the conditions of `forward`, [..., W]; the same at all times."""
        return self.condition(features.to(self.condition.bias.dtype))

    def forward(self, x: Tensor, t: Tensor, conditions: Tensor) -> tuple[Tensor, Tensor]:
        """Noisy latents x [..., C] at times t [...], conditions [..., W] -> v and log standard deviations, [..., C]."""
        kind = self.inputs.bias.dtype
        angles = t[..., None] * torch.logspace(0, 8, FREQUENCIES, 2.0, dtype=t.dtype, device=t.device)
        context = F.silu(conditions + self.time(torch.cat((angles.sin(), angles.cos()), -1).to(kind)))
        inner = self.inputs(x.to(kind))
        for block in self.blocks:
            inner = block(inner, context)
        shift, scale = self.modulation(context).chunk(2, -1)
        v, log_std = self.outputs(modulated(inner, shift, scale)).to(x.dtype).chunk(2, -1)
        return v, bounded(log_std)


def noisy(latents: Tensor, noise: Tensor, t: Tensor | float) -> tuple[Tensor, Tensor]:
    """Latents x_0 and noise e [..., C] -> (x_t, v) at times t, which broadcasts to them."""
    angle = torch.as_tensor(t, dtype=latents.dtype, device=latents.device) * (math.pi / 2)
    return angle.cos() * latents + angle.sin() * noise, angle.cos() * noise - angle.sin() * latents


def posterior(t: float, s: float) -> tuple[float, float, float]:
    """For s < t: x_s is Gaussian given x_t and x_0, with mean a x_t + b x_0 and variance c; returns (a, b, c)."""
    signal, noise = math.cos(t * math.pi / 2), math.sin(t * math.pi / 2)
    earlier, less = math.cos(s * math.pi / 2), math.sin(s * math.pi / 2)
    kept = signal / earlier
    added = noise**2 - (kept * less) ** 2  # the variance of x_t given x_s
    return kept * (less / noise) ** 2, earlier * added / noise**2, added * (less / noise) ** 2


def step_distribution(x: Tensor, v: Tensor, log_std: Tensor, t: float, s: float) -> tuple[Tensor, Tensor]:
    """The Gaussian of x_s given x_t = x [..., C] and the network's prediction there: (mean, standard deviation), [..., C]."""
    of_x, of_latent, variance = posterior(t, s)
    signal, noise = math.cos(t * math.pi / 2), math.sin(t * math.pi / 2)
    error = (of_latent * noise) ** 2 * (2 * log_std).exp()
    return of_x * x + of_latent * (signal * x - noise * v), (variance + error).sqrt()


def split(params: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Parameters of mixtures [..., P] -> (logits and means, log standard deviations [..., K C])."""
    count = params.shape[-1] // (1 + 2 * channels) * channels
    return params[..., :-count], params[..., -count:]


@dataclass(frozen=True)
class LatentConfig(PromptedConfig):
    """The shape of a target over latents."""

    channels: Width = 16  # C, of a latent


@dataclass(frozen=True)
class ContinuousConfig(LatentConfig):
    """The shape of a target with a mixture of Gaussians at every place."""

    components: Annotated[int, Between(1, 1024)] = 16  # K, of a mixture


class LatentTarget(PromptedTarget):
    """Latents after a prefix of word slots. Decoded latents have mean 0 and variance 1 in every channel, about.

    `latent_mean` and `latent_std` are those of the tokenizer's latents.
    """

    tokenizer_class = KL
    engine = "lanternpp.engine.latent_decode:LatentEngine"
    config: LatentConfig
    latent_mean: Tensor  # [C]
    latent_std: Tensor  # [C]
    vocab = 0
    channels = 1  # C, from the config
    defaults: Mapping[str, Any] = {"methods": {"eagle": {"tree": "chain-4", "verify": "token"}}}

    def __init__(self, config: LatentConfig, kl: KL):
        super().__init__(config, kl)
        self.channels = config.channels
        self.register_buffer("latent_mean", torch.zeros(config.channels))
        self.register_buffer("latent_std", torch.ones(config.channels))

    def add_tables(self) -> None:
        """A linear map of latents for the input."""
        self.latent_in = nn.Linear(self.config.channels, self.config.dim)

    def examples(self, count: int) -> Tensor:
        """Some latents along a line, [count, C]."""
        line = torch.linspace(-1, 1, count, dtype=torch.float32, device=self.latent_mean.device)
        return line[:, None].expand(-1, self.channels)

    def embed(self, codes: Tensor) -> Tensor:
        """Latents [R, N, C] -> [R, N, D]."""
        return self.latent_in(codes.to(self.word_table.dtype))

    def from_cache(self, found: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Moments of the tokenizer's latents [..., 2 C] -> latents [..., C], drawn; decoded latents stay as they are."""
        if found.shape[-1] == self.channels:
            return found
        return (sampled(found, generator) - self.latent_mean) / self.latent_std

    def pixels(self, codes: Tensor) -> Tensor:
        """Decoded latents [B, length, C] -> images [B, 3, H, W] in [-1, 1]."""
        return super().pixels(codes * self.latent_std + self.latent_mean)


class ContinuousTarget(LatentTarget):
    """The head gives the parameters of a mixture of Gaussians at every place."""

    config_class = ContinuousConfig
    config: ContinuousConfig

    def add_tables(self) -> None:
        """The map of latents for the input, and one to the parameters of mixtures for the output."""
        super().add_tables()
        self.latent_out = nn.Linear(self.config.dim, self.config.components * (1 + 2 * self.config.channels))

    def head(self, features: Tensor) -> Tensor:
        """features [..., D] -> parameters of a mixture [..., P], their log standard deviations within `MAX_LOG_STD`."""
        rest, log_std = split(self.latent_out(features), self.channels)
        return torch.cat((rest, bounded(log_std)), -1)


@dataclass(frozen=True)
class DiffusionConfig(LatentConfig):
    """The shape of a target with a diffusion head."""

    denoiser_width: Width = 256
    denoiser_blocks: Annotated[int, Between(1, 64)] = 3
    denoising_steps: Annotated[int, Between(1, 1000)] = 10  # T


class DiffusionTarget(LatentTarget):
    """The head draws a latent in `denoising_steps` steps; `head` gives the features that the steps read."""

    config_class = DiffusionConfig
    config: DiffusionConfig

    def add_tables(self) -> None:
        """The map of latents for the input, and the head."""
        super().add_tables()
        config = self.config
        self.denoiser = Denoiser(config.dim, config.channels, config.denoiser_width, config.denoiser_blocks)

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """The head computes in float32 at least, so that rounding depends little on the batch."""
        target = super().read(source, dtype, device)
        target.denoiser.to(torch.promote_types(dtype, torch.float32))
        return target

    def head(self, features: Tensor) -> Tensor:
        """The features themselves."""
        return features
