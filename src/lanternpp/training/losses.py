"""Losses of the trainings, each a function of tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pixel_differences(images: Tensor) -> tuple[Tensor, Tensor]:
    """Differences of neighbouring pixels, down and across."""
    return images[..., 1:, :] - images[..., :-1, :], images[..., 1:] - images[..., :-1]


def reconstruction(images: Tensor, truth: Tensor, scales: int = 3) -> Tensor:
    """L1 + 2 x squared error on pixels, and L1 on pixel differences at 1, 1/2, 1/4 ... of the size."""
    loss = F.l1_loss(images, truth) + 2 * F.mse_loss(images, truth)
    for scale in range(scales):
        if scale:
            images, truth = F.avg_pool2d(images, 2), F.avg_pool2d(truth, 2)
        for found, true in zip(pixel_differences(images), pixel_differences(truth), strict=True):
            loss = loss + F.l1_loss(found, true) / (2 * scales)
    return loss


def psnr(images: Tensor, truth: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB of each image [B]; both in [-1, 1], rounded to 8 bits."""
    found, true = (((x.float() + 1) * 127.5).round() for x in (images, truth))
    return -10 * ((found - true).square().flatten(1).mean(1) / 255**2).clamp_min(1e-10).log10()


def detail(images: Tensor) -> Tensor:
    """Energy [B] of the finest detail of images [B, 3, H, W]: what is left of them without a version of half the size."""
    coarse = F.interpolate(F.avg_pool2d(images, 2), scale_factor=2.0, mode="bilinear")
    return (images - coarse).square().flatten(1).mean(1)


def soft_cross_entropy(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Mean nats of `logits` [..., V] under the distribution of `target_logits` [..., V]."""
    return -(target_logits.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1).mean()


def acceptance(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Chance that a draft from `logits` [..., V] is kept by a target of `target_logits` [..., V]: sum min(p, q)."""
    return torch.minimum(logits.float().softmax(-1), target_logits.float().softmax(-1)).sum(-1)


def cross_entropy_and_lk(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Soft cross-entropy and the LK loss together."""
    return soft_cross_entropy(logits, target_logits) + lk_loss(logits, target_logits)


def lk_loss(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Mean of -log acceptance (the LK loss)."""
    return -acceptance(logits, target_logits).log().mean()
