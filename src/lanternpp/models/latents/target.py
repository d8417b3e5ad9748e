"""Targets over the latents of a KL autoencoder.

One has a mixture of Gaussians at every place (GIVT, arXiv 2312.02116). A mixture of K components over C channels is one row
of P = K (1 + 2 C) parameters: K logits of the weights, then K x C means, then K x C logarithms of standard deviations. The
other has a diffusion head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import torch
from torch import Tensor, nn

from lanternpp.models.latents.denoiser import Denoiser
from lanternpp.models.prompted import PromptedConfig, PromptedTarget
from lanternpp.models.vq.folder import read_kl
from lanternpp.models.vq.kl import KL, sampled
from lanternpp.nn.backend import backend
from lanternpp.nn.configs import Width
from lanternpp.nn.sources import Source
from lanternpp.util.schema import Between

CONTINUOUS, DIFFUSION = "continuous", "diffusion"  # a config's `kind`
MAX_LOG_STD = 5.0  # of a component, above and below 0


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

    tokenizer = staticmethod(read_kl)
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

    def pack(self) -> None:
        """Prepare for passes over few rows: the decoder, the maps of latents, and the head."""
        backend().pack(self)

    def misfit(self) -> tuple[str, str] | None:
        """Channels, and the grid."""
        own, found = (self.channels, self.length), (self.vq.config.dim, self.vq.length)
        if own == found:
            return None
        mine, other = (
            f"{length} latents per picture of {channels} channels" for channels, length in (own, found)
        )
        return mine, other

    @property
    def codebook(self) -> None:
        """There are no codes."""
        return None

    def examples(self, count: int) -> Tensor:
        """Some latents along a line, [count, C]."""
        line = torch.linspace(-1, 1, count, device=self.latent_mean.device)
        return line[:, None].expand(-1, self.channels)

    def embed(self, codes: Tensor) -> Tensor:
        """Latents [R, N, C] -> [R, N, D]."""
        embedded: Tensor = self.latent_in(codes.to(self.word_table.dtype))
        return embedded

    def from_cache(self, found: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Moments of the tokenizer's latents [..., 2 C] -> latents [..., C], drawn; decoded latents stay as they are."""
        if found.shape[-1] == self.channels:
            return found
        return (sampled(found, generator) - self.latent_mean) / self.latent_std

    def folded(self) -> tuple[LatentConfig, dict[str, Tensor]]:
        """The same model as it is written to disk for inference."""
        return replace(self.config, dropout=0.0), self.state_dict()

    def pixels(self, codes: Tensor) -> Tensor:
        """Decoded latents [B, length, C] -> images [B, 3, H, W] in [-1, 1]."""
        return super().pixels(codes * self.latent_std + self.latent_mean)


class ContinuousTarget(LatentTarget):
    """Its head gives the parameters of a mixture of Gaussians at every place."""

    config_class = ContinuousConfig
    engine = "lanternpp.engine.latent_decode:LatentEngine"
    config: ContinuousConfig

    def add_tables(self) -> None:
        """The map of latents for the input, and one to the parameters of mixtures for the output."""
        super().add_tables()
        self.latent_out = nn.Linear(self.config.dim, self.config.components * (1 + 2 * self.config.channels))

    def head(self, features: Tensor) -> Tensor:
        """features [..., D] -> parameters of a mixture [..., P], their log standard deviations within `MAX_LOG_STD`."""
        rest, log_std = split(self.latent_out(features), self.channels)
        return torch.cat((rest, MAX_LOG_STD * (log_std / MAX_LOG_STD).tanh()), -1)


@dataclass(frozen=True)
class DiffusionConfig(LatentConfig):
    """The shape of a target with a diffusion head."""

    denoiser_width: Width = 256
    denoiser_blocks: Annotated[int, Between(1, 64)] = 3
    denoising_steps: Annotated[int, Between(1, 1000)] = 10  # T


class DiffusionTarget(LatentTarget):
    """Its head draws a latent in `denoising_steps` steps; `head` gives the features that the steps read."""

    config_class = DiffusionConfig
    engine = "lanternpp.engine.latent_decode:DiffusionEngine"
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
