"""Pixels to codes by the convolutional encoder of VQGAN (arXiv 2012.09841), as several families publish it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.models.vq.vqgan import Attention, Level, Residual, VQGANConfig, norm


class DownLevel(Level):
    """A level, then, but in the last stage, half the size by a 3x3 of stride 2."""

    def __init__(self, inputs: int, outputs: int, blocks: int, attention: bool, last: bool):
        super().__init__(inputs, outputs, blocks, attention)
        self.down = nn.Identity() if last else nn.Conv2d(outputs, outputs, 3, stride=2)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H/2, W/2], or H and W in the last stage."""
        x = super().forward(x)
        return x if self.last else self.down(F.pad(x, (0, 1, 0, 1)))  # right and below, as it was trained


class VQGANEncoder(nn.Module):
    """The encoder that goes with a `VQGAN` of the same config; it has a block less in every stage."""

    def __init__(self, config: VQGANConfig):
        super().__init__()
        widths = [config.channels * multiple for multiple in config.multiples]
        coarsest, blocks = widths[-1], config.blocks - 1
        self.entry = nn.Conv2d(3, config.channels, 3, padding=1)
        stages, deepest = [], len(widths) - 1
        for i, (inputs, width) in enumerate(zip([config.channels, *widths], widths, strict=False)):
            stages.append(DownLevel(inputs, width, blocks, config.attention and i == deepest, i == deepest))
        self.stages = nn.Sequential(*stages)
        before = coarsest if blocks else config.channels
        self.middle = nn.Sequential(Residual(before, before), Attention(before), Residual(before, before))
        self.exit = nn.Sequential(norm(before), nn.SiLU(), nn.Conv2d(before, config.latent, 3, padding=1))
        self.squeeze = nn.Conv2d(config.latent, config.dim, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [-1, 1] -> latents [B, C, H/down, W/down]."""
        return self.squeeze(self.exit(self.middle(self.stages(self.entry(images)))))
