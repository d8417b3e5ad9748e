"""Targets over the latents of a KL autoencoder, with a mixture of Gaussians or a diffusion head for every latent.

A mixture (GIVT, arXiv 2312.02116) of K components over C channels is one row of P = K (1 + 2 C) parameters: K logits of the weights,
then K x C means, then K x C logarithms of standard deviations.

A diffusion head draws a latent as the end of a short chain of Gaussian steps (MAR, 2406.11838, section 3.2). A small network reads a
noisy latent, the time, and the decoder's feature for the latent, which is the condition. At time t, 0 < t <= 1, a noisy latent is
x_t = cos(t pi / 2) x_0 + sin(t pi / 2) e for noise e of variance 1, so that x_1 is noise alone (the cosine schedule of 2102.09672).
The network predicts v = cos(t pi / 2) e - sin(t pi / 2) x_0 (2202.00512), which gives x_0, and the standard deviation of the error of
v, per channel. A step from t to an earlier s draws x_s from a Gaussian, whose variance is that of x_s for a known x_0 plus the share
of the error of x_0 (2206.07309). So few steps suffice, the last step has a density, and a Gaussian x_0 is drawn from its exact
distribution in any number of steps.
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
NUM_FREQUENCIES = 16  # of the embedding of the time, from 1 to 256 radians
MAX_LOG_STD = 5.0  # maximum absolute logarithm of the standard deviation of a component or of an error


def bounded(log_std: Tensor) -> Tensor:
    """Squash logarithms of standard deviations into -`MAX_LOG_STD` to `MAX_LOG_STD`."""
    return MAX_LOG_STD * (log_std / MAX_LOG_STD).tanh()


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Normalise x [..., W] over its channels, then scale and shift it [..., W] (adaptive norm, arXiv 2212.09748)."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


class DenoiserBlock(nn.Module):
    """A residual layer, initialised as the identity."""

    def __init__(self, width: int):
        super().__init__()
        self.modulation = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Map x [..., W] to [..., W]; context [..., W] embeds the time and the condition."""
        shift, scale, gate = self.modulation(context).chunk(3, -1)
        inner: Tensor = self.down(F.silu(self.up(modulated(x, shift, scale))))
        return x + gate * inner


class Denoiser(nn.Module):
    """The network that predicts v and the log standard deviation of its error, initialised to v = 0 and a deviation of 1."""

    def __init__(self, dim: int, channels: int, width: int, blocks: int):
        super().__init__()
        self.dim = dim
        self.inputs, self.condition = nn.Linear(channels, width), nn.Linear(dim, width)
        self.time = nn.Sequential(nn.Linear(2 * NUM_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DenoiserBlock(width) for _ in range(blocks))
        self.modulation, self.outputs = nn.Linear(width, 2 * width), nn.Linear(width, 2 * channels)
        for layer in (self.modulation, self.outputs):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def conditions(self, features: Tensor) -> Tensor:
        """Map features [..., D] to the conditions [..., W] of `forward`, which are the same at all times."""
        return self.condition(features.to(self.condition.bias.dtype))

    def forward(self, x: Tensor, t: Tensor, conditions: Tensor) -> tuple[Tensor, Tensor]:
        """Return v and log standard deviations [..., C] for noisy latents x [..., C] at times t [...], under conditions [..., W]."""
        dtype = self.inputs.bias.dtype
        angles = t[..., None] * torch.logspace(0, 8, NUM_FREQUENCIES, 2.0, dtype=t.dtype, device=t.device)
        context = F.silu(conditions + self.time(torch.cat((angles.sin(), angles.cos()), -1).to(dtype)))
        inner = self.inputs(x.to(dtype))
        for block in self.blocks:
            inner = block(inner, context)
        shift, scale = self.modulation(context).chunk(2, -1)
        v, log_std = self.outputs(modulated(inner, shift, scale)).to(x.dtype).chunk(2, -1)
        return v, bounded(log_std)


def noisy(latents: Tensor, noise: Tensor, t: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return (x_t, v) for latents x_0 and noise e [..., C] at times t, which broadcast to [..., C]."""
    angle = torch.as_tensor(t, dtype=latents.dtype, device=latents.device) * (math.pi / 2)
    return angle.cos() * latents + angle.sin() * noise, angle.cos() * noise - angle.sin() * latents


def posterior(t: float, s: float) -> tuple[float, float, float]:
    """Return (a, b, c) for s < t: given x_t and x_0, x_s is Gaussian with mean a x_t + b x_0 and variance c."""
    signal_t, noise_t = math.cos(t * math.pi / 2), math.sin(t * math.pi / 2)
    signal_s, noise_s = math.cos(s * math.pi / 2), math.sin(s * math.pi / 2)
    ratio = signal_t / signal_s  # given x_s, x_t has mean ratio x_s
    variance = noise_t**2 - (ratio * noise_s) ** 2  # of x_t given x_s
    noise_share = (noise_s / noise_t) ** 2
    return ratio * noise_share, signal_s * variance / noise_t**2, variance * noise_share


def step_distribution(x: Tensor, v: Tensor, log_std: Tensor, t: float, s: float) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation [..., C] of x_s, given x_t = x [..., C] and the network's prediction (v, log_std) at t."""
    x_weight, latent_weight, variance = posterior(t, s)
    signal, noise = math.cos(t * math.pi / 2), math.sin(t * math.pi / 2)
    latents = signal * x - noise * v  # the predicted x_0
    error_variance = (latent_weight * noise) ** 2 * (2 * log_std).exp()
    return x_weight * x + latent_weight * latents, (variance + error_variance).sqrt()


def split(params: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Split parameters of mixtures [..., P] into logits and means [..., K + K C], and log standard deviations [..., K C]."""
    num_stds = params.shape[-1] // (1 + 2 * channels) * channels
    return params[..., :-num_stds], params[..., -num_stds:]


@dataclass(frozen=True)
class LatentConfig(PromptedConfig):
    """The shape of a target over latents."""

    channels: Width = 16  # C, of a latent


@dataclass(frozen=True)
class ContinuousConfig(LatentConfig):
    """The shape of a target with a mixture of Gaussians for every latent."""

    components: Annotated[int, Between(1, 1024)] = 16  # K, of a mixture


class LatentTarget(PromptedTarget):
    """A decoder of latents, normalised to mean 0 and variance 1 per channel, after a prefix of word slots."""

    tokenizer_class = KL
    engine = "lanternpp.engine.latent_decode:LatentEngine"
    config: LatentConfig
    latent_mean: Tensor  # [C], of the tokenizer's latents
    latent_std: Tensor  # [C], of the tokenizer's latents
    vocab = 0
    channels = 1  # C, from the config
    defaults: Mapping[str, Any] = {"methods": {"eagle": {"tree": "chain-4", "verify": "token"}}}

    def __init__(self, config: LatentConfig, kl: KL):
        super().__init__(config, kl)
        self.channels = config.channels
        self.register_buffer("latent_mean", torch.zeros(config.channels, dtype=torch.float32))
        self.register_buffer("latent_std", torch.ones(config.channels, dtype=torch.float32))

    def add_tables(self) -> None:
        """Make the linear map of input latents."""
        self.latent_in = nn.Linear(self.config.channels, self.config.dim)

    def examples(self, count: int) -> Tensor:
        """Return latents along a line, [count, C]."""
        line = torch.linspace(-1, 1, count, dtype=torch.float32, device=self.latent_mean.device)
        return line[:, None].expand(-1, self.channels)

    def embed(self, codes: Tensor) -> Tensor:
        """Embed latents [R, N, C] as [R, N, D]."""
        return self.latent_in(codes.to(self.word_table.dtype))

    def from_cache(self, found: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw latents [..., C] from moments of the tokenizer's latents [..., 2 C]; return decoded latents [..., C] unchanged."""
        if found.shape[-1] == self.channels:
            return found
        return (sampled(found, generator) - self.latent_mean) / self.latent_std

    def pixels(self, codes: Tensor) -> Tensor:
        """Turn decoded latents [B, length, C] into images [B, 3, H, W] in [-1, 1]."""
        return super().pixels(codes * self.latent_std + self.latent_mean)


class ContinuousTarget(LatentTarget):
    """A target whose head gives the parameters of a mixture of Gaussians for every latent."""

    config_class = ContinuousConfig
    config: ContinuousConfig

    def add_tables(self) -> None:
        """Make the map of input latents, and the map of features to parameters of mixtures."""
        super().add_tables()
        self.latent_out = nn.Linear(self.config.dim, self.config.components * (1 + 2 * self.config.channels))

    def head(self, features: Tensor) -> Tensor:
        """Map features [..., D] to parameters of a mixture [..., P], with log standard deviations within `MAX_LOG_STD`."""
        logits_and_means, log_std = split(self.latent_out(features), self.channels)
        return torch.cat((logits_and_means, bounded(log_std)), -1)


@dataclass(frozen=True)
class DiffusionConfig(LatentConfig):
    """The shape of a target with a diffusion head."""

    denoiser_width: Width = 256
    denoiser_blocks: Annotated[int, Between(1, 64)] = 3
    denoising_steps: Annotated[int, Between(1, 1000)] = 10  # T


class DiffusionTarget(LatentTarget):
    """A target whose diffusion head draws a latent in `denoising_steps` steps; `head` returns the features that the steps read."""

    config_class = DiffusionConfig
    config: DiffusionConfig

    def add_tables(self) -> None:
        """Make the map of input latents, and the diffusion head."""
        super().add_tables()
        config = self.config
        self.denoiser = Denoiser(config.dim, config.channels, config.denoiser_width, config.denoiser_blocks)

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """Read the target, with a diffusion head in float32 at least, so that its rounding depends little on the batch."""
        target = super().read(source, dtype, device)
        target.denoiser.to(torch.promote_types(dtype, torch.float32))
        return target

    def head(self, features: Tensor) -> Tensor:
        """Return the features, which are the conditions of the diffusion head."""
        return features
