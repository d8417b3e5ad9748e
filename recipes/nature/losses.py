"""Losses of a tokenizer: on pixels, in a classifier's features (LPIPS, arXiv 1801.03924), and of a patch discriminator
(PatchGAN, arXiv 1611.07004; its adaptive weight: VQGAN, arXiv 2012.09841, eq. 7). Losses of a diffusion head."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.evaluation.classifier import Block, Classifier
from lanternpp.models.latents import Denoiser, noisy, posterior, step_distribution


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
    """Energy [B] of the finest detail of images [B, 3, H, W]: the difference from a version of half the size."""
    coarse = F.interpolate(F.avg_pool2d(images, 2), scale_factor=2.0, mode="bilinear")
    return (images - coarse).square().flatten(1).mean(1)


class Perceptual(nn.Module):
    """Squared distance of unit features, summed over the stages of a classifier and averaged over places.

    Every stage counts as it is, without the learned weights of the paper.
    """

    def __init__(self, classifier: Classifier):
        super().__init__()
        self.classifier = classifier.eval().requires_grad_(False)

    def features(self, images: Tensor) -> list[Tensor]:
        """Images [B, 3, H, W] in [-1, 1] -> the features [B, C, h, w] after the stem and after every stage."""
        x = self.classifier.stem(images.contiguous(memory_format=torch.channels_last))
        found = [x]
        for layer in self.classifier.stages:
            if not isinstance(layer, Block):
                break  # the last norm and activation
            x = layer(x)
            if found[-1].shape[1:] == x.shape[1:]:
                found.pop()  # a later block of the same stage
            found.append(x)
        return found

    def forward(self, images: Tensor, truth: Tensor) -> Tensor:
        """Two batches of images [B, 3, H, W] in [-1, 1] -> their mean distance, with a gradient for the first."""
        with torch.no_grad():
            aims = [unit(x) for x in self.features(truth)]
        pairs = zip(self.features(images), aims, strict=True)
        return torch.stack([(unit(x) - aim).square().sum(1).mean() for x, aim in pairs]).sum()


def unit(features: Tensor) -> Tensor:
    """Features [B, C, H, W] of length 1 at every place."""
    x = features.float()
    return x * (x.square().sum(1, keepdim=True) + 1e-6).rsqrt()


class Discriminator(nn.Module):
    """Images [B, 3, H, W] -> a score per patch [B, 1, H/8, W/8], and the features of every layer.

    since: the progress at which it began to learn, NaN before.
    """

    since: Tensor

    def __init__(self, channels: tuple[int, ...] = (64, 128, 256)):
        super().__init__()
        self.register_buffer("since", torch.tensor(torch.nan, dtype=torch.float64))
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
    losses = [F.l1_loss(generated.float(), target.detach().float()) for generated, target in pairs]
    return torch.stack(losses).mean()


def adaptive_weight(first: Tensor, second: Tensor, cap: float = 1e4) -> Tensor:
    """How much to scale gradient `second` so that it is as long as `first`."""
    return (first.norm() / (second.norm() + 1e-8)).clamp_max(cap)


def denoising_loss(denoiser: Denoiser, features: Tensor, latents: Tensor, times: int) -> Tensor:
    """The training loss at latents [..., C] under features [..., D], a number for each place, [...].

    The squared error of v, and the negative log likelihood of its error, through which the mean learns nothing. Each place is
    seen at so many random times, one in each of as many equal parts of (0, 1].
    """
    shape = (*latents.shape[:-1], times)
    t = (torch.arange(times, device=latents.device) + torch.rand(shape, device=latents.device)) / times
    clean = latents.float()[..., None, :].expand(*shape, -1)
    x, true = noisy(clean, torch.randn(clean.shape, device=clean.device), t[..., None])
    v, log_std = denoiser(x, t, denoiser.conditions(features)[..., None, :])
    error = (v - true).square()
    return (error / 2 + error.detach() * (-2 * log_std).exp() / 2 + log_std).mean((-1, -2))


def variational_bound(
    denoiser: Denoiser, features: Tensor, latents: Tensor, steps: int, generator: torch.Generator
) -> Tensor:
    """An upper bound, in expectation, of -log p(latents) in nats a number under so many steps: [...] of latents [..., C].

    The sum of the divergences of all steps but the last, and the last one's -log density (arXiv 2006.11239, equation 5). Noise
    is drawn from a generator of the CPU.
    """
    latents, conditions = latents.float(), denoiser.conditions(features)
    nats = torch.zeros_like(latents)
    for step in range(steps, 0, -1):
        t, s = step / steps, (step - 1) / steps
        x, _ = noisy(latents, torch.randn(latents.shape, generator=generator).to(latents.device), t)
        v, log_std = denoiser(x, x.new_full((), t), conditions)
        mean, std = step_distribution(x, v, log_std, t, s)
        of_x, of_latent, variance = posterior(t, s)
        true = of_x * x + of_latent * latents
        spread = ((true - mean).square() + variance) / std.square()
        constant = math.log(2 * math.pi) if step == 1 else -1 - math.log(variance)
        nats += (spread + constant) / 2 + std.log()
    return nats.mean(-1)
