"""Tokenizers as they are trained: with a quantiser or a distribution of latents, and its loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.models.vq.autoencoder import KL, VQ, Autoencoder, Quantiser, clamped, sampled

MOVING = ("quantiser.sums", "quantiser.counts")  # statistics of training, which a model folder does not hold


class MovingQuantiser(Quantiser):
    """Its codebook follows the latents as a moving k-means. Codes that are rarely chosen are restarted at a random latent of the batch."""

    decay = 0.99  # of its moving sums
    dead = 0.05  # share of the average use below which a code is restarted
    sums: Tensor  # [V, C], moving sum of the latents of each code
    # [V], moving number of latents of each code; zero at first, so that the first batch initialises the codebook
    counts: Tensor

    def __init__(self, codes: int, dim: int):
        super().__init__(codes, dim)
        self.register_buffer("sums", self.codebook.clone())
        self.register_buffer("counts", torch.zeros(codes))

    def restart(self) -> None:
        """Reset the moving statistics, keeping the codebook."""
        self.sums, self.counts = self.codebook.clone(), torch.zeros_like(self.codebook[:, 0])

    def forward(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """latents [..., C] -> (quantised [..., C] straight through, codes [...], commitment loss)."""
        unit = F.normalize(latents.float(), dim=-1)
        with torch.no_grad():
            codes = self.nearest(unit)
            chosen = self.codebook[codes]
            if self.training:
                self.follow(unit.flatten(0, -2), codes.flatten())
        commitment = F.mse_loss(unit, chosen) * unit.shape[-1]
        return unit + (chosen - unit).detach(), codes, commitment

    @torch.no_grad()
    def follow(self, unit: Tensor, codes: Tensor) -> None:
        """Move the codebook towards unit latents [M, C] with codes [M]; restart unused codes. No host read."""
        counts = torch.zeros_like(self.counts).index_add_(0, codes, torch.ones_like(unit[:, 0]))
        sums = torch.zeros_like(self.sums).index_add_(0, codes, unit)
        self.counts.lerp_(counts, 1 - self.decay)
        self.sums.lerp_(sums, 1 - self.decay)
        average = unit.shape[0] / self.counts.shape[0]
        dead = (self.counts < self.dead * average)[:, None]
        restarted = unit[torch.randint(unit.shape[0], self.counts.shape, device=unit.device)]
        self.sums.copy_(torch.where(dead, restarted * average, self.sums))
        self.counts.copy_(torch.where(dead[:, 0], torch.full_like(self.counts, average), self.counts))
        self.codebook.copy_(F.normalize(self.sums, dim=-1))


class TrainedVQ(VQ):
    """A tokenizer of codes."""

    quantiser_class = MovingQuantiser
    quantiser: MovingQuantiser

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images [B, 3, H, W] -> (reconstruction, codes [B, length], weighted commitment loss)."""
        quantised, codes, commitment = self.quantiser(self.encoded(images))
        return self.render(quantised), codes, self.config.commitment * commitment


class TrainedKL(KL):
    """A tokenizer of latents."""

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images [B, 3, H, W] -> (reconstruction, moments [B, length, 2 C], weighted divergence)."""
        moments = clamped(self.encoded(images))
        mean, log_var = moments.chunk(2, -1)
        divergence = (mean.square() + log_var.exp() - log_var - 1).mean() / 2
        return self.render(sampled(moments).to(self.dtype)), moments, self.config.kl * divergence


@torch.no_grad()
def redraw(tokenizer: Autoencoder, found: Tensor) -> Tensor:
    """Codes or moments that `encode` gave -> images [B, 3, H, W] in [-1, 1], float32."""
    return tokenizer.render(latents_of(tokenizer, found).to(tokenizer.dtype)).clamp(-1, 1)


def latents_of(tokenizer: Autoencoder, found: Tensor) -> Tensor:
    """Codes or moments that `encode` gave -> the decoder's input, [B, length, C]."""
    return tokenizer.codebook[found] if isinstance(tokenizer, VQ) else sampled(found)
