"""A small patch discriminator (PatchGAN, 1611.07004) and the adaptive weight of VQGAN (2012.09841, eq. 7)."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Discriminator(nn.Module):
    """Images [B, 3, H, W] -> a score per patch [B, 1, H/8, W/8], and the features of every layer."""

    def __init__(self, channels: tuple[int, ...] = (64, 128, 256)):
        super().__init__()
        self.stem = nn.Conv2d(3, channels[0], 4, 2, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 4, 2, 1), nn.GroupNorm(o // 16, o)) for i, o in pairwise(channels)
        )
        self.last = nn.Sequential(
            nn.Conv2d(channels[-1], channels[-1], 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(channels[-1], 1, 3, padding=1),
        )

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Scores and features."""
        features = [F.leaky_relu(self.stem(images.contiguous(memory_format=torch.channels_last)), 0.2)]
        for layer in self.layers:
            features.append(F.leaky_relu(layer(features[-1]), 0.2))
        return self.last(features[-1]).float(), features


def hinge_loss(real: Tensor, fake: Tensor) -> Tensor:
    """The discriminator's loss."""
    return (F.relu(1 - real).mean() + F.relu(1 + fake).mean()) / 2


def feature_matching(fake: list[Tensor], real: list[Tensor]) -> Tensor:
    """L1 distance of the discriminator's features (pix2pixHD, 1711.11585)."""
    pairs = zip(fake, real, strict=True)
    return torch.stack(
        [F.l1_loss(generated.float(), target.detach().float()) for generated, target in pairs]
    ).mean()


def adaptive_weight(first: Tensor, second: Tensor, cap: float = 1e4) -> Tensor:
    """How much to scale gradient `second` so that it is as long as `first`."""
    return (first.norm() / (second.norm() + 1e-8)).clamp_max(cap)
