"""Vector quantisation (arXiv 1711.00937) on the unit sphere (ViT-VQGAN, 2110.04627, section 3.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Quantiser(nn.Module):
    """The nearest row of an l2-normalised codebook, which follows the latents as a moving k-means.

    Codes that are rarely chosen are restarted at a random latent of the batch.
    """

    codebook: Tensor  # [V, C], unit rows
    sums: Tensor  # [V, C], moving sum of the latents of each code
    counts: (
        Tensor  # [V], moving number of them; zero at first, so that the first batch initialises the codebook
    )

    def __init__(self, codes: int, dim: int, decay: float = 0.99, dead: float = 0.05):
        super().__init__()
        self.decay = decay
        self.dead = dead  # a code chosen less often than this share of the average is revived
        codebook = F.normalize(nn.init.normal_(torch.empty(codes, dim)), dim=-1)
        self.register_buffer("codebook", codebook)
        self.register_buffer("sums", codebook.clone(), persistent=True)
        self.register_buffer("counts", torch.zeros(codes), persistent=True)

    def restart(self) -> None:
        """Reset the moving statistics, keeping the codebook."""
        self.sums, self.counts = self.codebook.clone(), torch.zeros_like(self.codebook[:, 0])

    def nearest(self, latents: Tensor) -> Tensor:
        """latents [..., C] -> codes [...], the rows of least distance."""
        flat = F.normalize(latents.float(), dim=-1).flatten(0, -2)
        rows = 32768 if flat.is_cuda else 64  # few enough for a CPU's scores to stay in its cache
        with torch.autocast(flat.device.type, enabled=False):
            parts = [argmax(part @ self.codebook.t()) for part in flat.split(rows)]
        return torch.cat(parts).view(latents.shape[:-1])

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
        """Move the codebook towards unit latents [M, C] with codes [M]; revive the dead. No host read."""
        counts = torch.zeros_like(self.counts).index_add_(0, codes, torch.ones_like(unit[:, 0]))
        sums = torch.zeros_like(self.sums).index_add_(0, codes, unit)
        self.counts.lerp_(counts, 1 - self.decay)
        self.sums.lerp_(sums, 1 - self.decay)
        average = unit.shape[0] / self.counts.shape[0]
        dead = (self.counts < self.dead * average)[:, None]
        fresh = unit[torch.randint(unit.shape[0], self.counts.shape, device=unit.device)]
        self.sums.copy_(torch.where(dead, fresh * average, self.sums))
        self.counts.copy_(torch.where(dead[:, 0], torch.full_like(self.counts, average), self.counts))
        self.codebook.copy_(F.normalize(self.sums, dim=-1))


def argmax(scores: Tensor, side: int = 64) -> Tensor:
    """The first best column of scores [M, V] -> [M]; by blocks, since amax is vectorised and argmax is not."""
    if scores.shape[1] % side:
        return scores.argmax(1)
    blocks = scores.unflatten(1, (-1, side))
    block = blocks.amax(2).argmax(1)
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, side))[:, 0].argmax(1)
    return block * side + inside
