"""Targets over the latents of a KL autoencoder; one has a mixture of Gaussians at every place (GIVT, arXiv 2312.02116)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from lanternpp.continuous.mixture import bounded, size
from lanternpp.models.prompted import PromptedConfig, PromptedTarget
from lanternpp.models.vq.folder import read_kl
from lanternpp.models.vq.kl import KL, sampled
from lanternpp.nn.backend import backend
from lanternpp.nn.configs import Width
from lanternpp.util.schema import Between

KIND = "continuous"


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
    channels = 1  # C, which the config decides
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
    config: ContinuousConfig

    def add_tables(self) -> None:
        """The map of latents for the input, and one to the parameters of mixtures for the output."""
        super().add_tables()
        self.latent_out = nn.Linear(self.config.dim, size(self.config.components, self.config.channels))

    def head(self, features: Tensor) -> Tensor:
        """features [..., D] -> parameters of a mixture [..., P], as `GaussianMixture.of` reads them."""
        return bounded(self.latent_out(features), self.channels)
