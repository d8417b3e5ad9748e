"""A diffusion head: one latent is drawn as the end of a short chain of Gaussian steps (MAR, arXiv 2406.11838, section 3.2).

A small network reads a noisy latent, the time, and the decoder's feature at the place, which is its condition. At time t,
0 < t <= 1, a noisy latent is x_t = cos(t pi / 2) x_0 + sin(t pi / 2) e for noise e of variance 1, so that x_1 is noise
alone (the cosine schedule of arXiv 2102.09672). The network predicts v = cos(t pi / 2) e - sin(t pi / 2) x_0
(arXiv 2202.00512), which gives x_0, and the standard deviation of its error, per channel. A step from t to an earlier s
draws from the Gaussian with the mean and variance of x_s: those of x_s for a known x_0, plus the error of x_0
(arXiv 2206.07309). So few steps suffice, the last step has a density, and where x_0 is Gaussian any number of steps gives
its exact distribution.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FREQUENCIES = 16  # of the time, from 1 to 256 radians
MAX_LOG_STD = 5.0  # of an error, above and below 0


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x [..., W], normalised over its channels, scaled and shifted as the condition says (adaptive norm, arXiv 2212.09748)."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


class DenoiserBlock(nn.Module):
    """A residual layer, which begins as the identity."""

    def __init__(self, width: int):
        super().__init__()
        self.modulation = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """x [..., W] -> [..., W]; context [..., W] is of the time and the condition."""
        shift, scale, gate = self.modulation(context).chunk(3, -1)
        inner: Tensor = self.down(F.silu(self.up(modulated(x, shift, scale))))
        return x + gate * inner


class Denoiser(nn.Module):
    """Predicts v and the logarithm of its error's standard deviation. It begins with v = 0 and errors of 1."""

    def __init__(self, dim: int, channels: int, width: int, blocks: int):
        super().__init__()
        self.dim = dim
        self.inputs, self.condition = nn.Linear(channels, width), nn.Linear(dim, width)
        self.time = nn.Sequential(nn.Linear(2 * FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DenoiserBlock(width) for _ in range(blocks))
        self.modulation, self.outputs = nn.Linear(width, 2 * width), nn.Linear(width, 2 * channels)
        for layer in (self.modulation, self.outputs):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def conditions(self, features: Tensor) -> Tensor:
        """Features [..., D] -> the conditions of `forward`, [..., W]; the same at all times."""
        conditions: Tensor = self.condition(features.to(self.condition.bias.dtype))
        return conditions

    def forward(self, x: Tensor, t: Tensor, conditions: Tensor) -> tuple[Tensor, Tensor]:
        """Noisy latents x [..., C] at times t [...], conditions [..., W] -> v and log standard deviations, [..., C]."""
        kind = self.inputs.bias.dtype
        angles = t[..., None] * torch.logspace(0, 8, FREQUENCIES, 2.0, dtype=t.dtype, device=t.device)
        context = F.silu(conditions + self.time(torch.cat((angles.sin(), angles.cos()), -1).to(kind)))
        inner = self.inputs(x.to(kind))
        for block in self.blocks:
            inner = block(inner, context)
        shift, scale = self.modulation(context).chunk(2, -1)
        v, log_std = self.outputs(modulated(inner, shift, scale)).to(x.dtype).chunk(2, -1)
        return v, MAX_LOG_STD * (log_std / MAX_LOG_STD).tanh()


def noisy(latents: Tensor, noise: Tensor, t: Tensor | float) -> tuple[Tensor, Tensor]:
    """Latents x_0 and noise e [..., C] -> (x_t, v) at times t, which broadcasts to them."""
    angle = torch.as_tensor(t, dtype=latents.dtype, device=latents.device) * (math.pi / 2)
    return angle.cos() * latents + angle.sin() * noise, angle.cos() * noise - angle.sin() * latents


def posterior(t: float, s: float) -> tuple[float, float, float]:
    """For s < t: x_s is Gaussian given x_t and x_0, with mean a x_t + b x_0 and variance c; returns (a, b, c)."""
    signal, noise = math.cos(t * math.pi / 2), math.sin(t * math.pi / 2)
    earlier, less = math.cos(s * math.pi / 2), math.sin(s * math.pi / 2)
    kept = signal / earlier
    added = noise**2 - (kept * less) ** 2  # the variance of x_t given x_s
    return kept * (less / noise) ** 2, earlier * added / noise**2, added * (less / noise) ** 2


def step_distribution(x: Tensor, v: Tensor, log_std: Tensor, t: float, s: float) -> tuple[Tensor, Tensor]:
    """The Gaussian of x_s given x_t = x [..., C] and what the network predicts there: (mean, standard deviation), [..., C]."""
    of_x, of_latent, variance = posterior(t, s)
    signal, noise = math.cos(t * math.pi / 2), math.sin(t * math.pi / 2)
    error = (of_latent * noise) ** 2 * (2 * log_std).exp()
    return of_x * x + of_latent * (signal * x - noise * v), (variance + error).sqrt()


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
