"""A tokenizer of continuous latents: the networks of `model.py` as a variational autoencoder (arXiv 1312.6114).

In place of a quantiser, every place has a Gaussian over C channels, held to a standard normal law by the Kullback-Leibler
divergence under a small weight (the KL-regularised autoencoder of arXiv 2112.10752, section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.models.vq.model import Autoencoder, Pixels, Stacks, decoder, encoder
from lanternpp.models.vq.reading import Reader
from lanternpp.nn.configs import StageBlocks, Stages, Width
from lanternpp.util.schema import Between

WIDEST = 10.0  # of the logarithm of a variance, above and below 0


@dataclass(frozen=True)
class KLConfig(Stacks):
    """Shape of the tokenizer."""

    size: Pixels = 128  # of an image's side
    dim: Width = 16  # C, of a latent
    channels: Stages = (32, 128, 256)  # at 1/2, 1/4, 1/8 of the size
    encoder_blocks: StageBlocks = (1, 1, 2)
    decoder_blocks: StageBlocks = (1, 2, 3)
    thin: Width = 16  # channels of the decoder's last stage, at full size
    kl: Annotated[float, Between(0, 1000)] = 1e-3  # weight of the divergence, in nats a number


class KL(Autoencoder):
    """Images in [-1, 1] <-> latents in raster order. What it sees at a place are moments: C means, then C log variances."""

    config: KLConfig

    def __init__(self, config: KLConfig):
        super().__init__()
        self.config = config
        self.encoder = encoder(config, 2 * config.dim)
        self.decoder = decoder(config)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images [B, 3, H, W] -> (reconstruction, moments [B, length, 2 C], weighted divergence)."""
        moments = clamped(self.encoded(images))
        mean, log_var = moments.chunk(2, -1)
        divergence = (mean.square() + log_var.exp() - log_var - 1).mean() / 2
        return self.render(sampled(moments).to(self.dtype)), moments, self.config.kl * divergence

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [-1, 1] -> moments [B, length, 2 C], float32."""
        return clamped(self.read(images))

    def decoder_input(self, found: Tensor) -> Tensor:
        """Latents drawn from moments [B, length, 2 C]: [B, length, C]."""
        return sampled(found)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B, length, C] -> images [B, 3, H, W] in [-1, 1], float32."""
        expected = (self.length, self.config.dim)
        if latents.ndim != 3 or tuple(latents.shape[1:]) != expected:
            raise InputError(
                f"latents are {tuple(latents.shape)}; it draws from [B, {expected[0]}, {expected[1]}]."
            )
        return self.render(latents.to(self.dtype)).clamp(-1, 1)

    def reader(self) -> Reader:
        """What it makes of pictures, as trainings ask for it; its convolutions are laid out channels last."""
        key, device = self.key(), next(self.parameters()).device
        stored = (torch.float16, (2 * self.config.dim,))
        return Reader(self.config.size, self.length, 0, key, self.encode, device, *stored)


def clamped(moments: Tensor) -> Tensor:
    """The encoder's output [..., 2 C] as moments, float32: log variances within `WIDEST`."""
    mean, log_var = moments.float().chunk(2, -1)
    return torch.cat((mean, log_var.clamp(-WIDEST, WIDEST)), -1)


def sampled(moments: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Moments [..., 2 C] -> latents [..., C], drawn."""
    mean, log_var = moments.float().chunk(2, -1)
    noise = torch.randn(mean.shape, generator=generator).to(mean.device)
    return mean + (log_var / 2).exp() * noise
