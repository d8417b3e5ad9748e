"""How far the published rule of continuous speculative decoding (arXiv 2411.11925) is from the target's distribution, in one dimension.

A target and a drafter are diffusion models of T steps whose denoisers are exact for two mixtures of Gaussians, so that the
density that each draws from can be computed on a grid. Three rules verify the same drafts: the exact one on these densities; the
published one, on the last step of both trajectories, with its factor Sigma and three tries; and the published one without the
factor, with as many tries as it takes.
`python bench/published_rule.py` prints a table.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

GRID = torch.linspace(-6, 6, 2401, dtype=torch.float64)
CELLS = torch.linspace(-6, 6, 121, dtype=torch.float64)


@dataclass(frozen=True)
class Diffusion:
    """Ancestral sampling (DDPM, arXiv 2006.11239) with the exact denoiser of a mixture."""

    weight: Tensor  # [K]
    mean: Tensor  # [K]
    std: Tensor  # [K]
    beta: Tensor  # [T], of steps 1..T
    wide: float  # the standard deviation of step t, in roots of beta_t

    def noise_std(self, t: int) -> Tensor:
        """The standard deviation of step t."""
        return self.wide * self.beta[t - 1].sqrt()

    def step(self, x: Tensor, t: int) -> Tensor:
        """The mean of x_{t-1} given x_t [n]: [n]."""
        kept = (1 - self.beta).cumprod(0)
        now, before = kept[t - 1], kept[t - 2] if t > 1 else torch.ones_like(kept[0])
        variance = now * self.std**2 + 1 - now  # of x_t under each component
        offset = x[:, None] - now.sqrt() * self.mean
        share = (self.weight.log() - offset.square() / variance / 2 - variance.log() / 2).softmax(-1)
        clean = (share * (self.mean + now.sqrt() * self.std**2 / variance * offset)).sum(-1)
        beta = self.beta[t - 1]
        return (before.sqrt() * beta * clean + (1 - beta).sqrt() * (1 - before) * x) / (1 - now)

    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """noise [T + 1, n] -> (x_0 [n], the mean that its last step had [n])."""
        x, mean = noise[-1], noise[-1]
        for t in range(len(self.beta), 0, -1):
            mean = self.step(x, t)
            x = mean + self.noise_std(t) * noise[t - 1]
        return x, mean

    def density(self) -> Tensor:
        """The density of x_0 on `GRID`."""
        spacing = GRID[1] - GRID[0]
        found = normal(GRID, torch.zeros_like(GRID), torch.ones(()).double())
        for t in range(len(self.beta), 0, -1):
            kernel = normal(GRID[:, None], self.step(GRID, t)[None], self.noise_std(t))
            found = kernel @ found * spacing
        return found / (found.sum() * spacing)


def normal(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """The density of a Gaussian."""
    return (-((x - mean) / std).square() / 2).exp() / (std * (2 * torch.pi) ** 0.5)


def at(density: Tensor, x: Tensor) -> Tensor:
    """A density on `GRID` at x [n], interpolated."""
    place = ((x - GRID[0]) / (GRID[1] - GRID[0])).clamp(0, len(GRID) - 1.001)
    low = place.long()
    return torch.lerp(density[low], density[low + 1], place - low)


def published(
    target: Diffusion, drafter: Diffusion, noise: Tensor, factor: bool, tries: int | None
) -> tuple[Tensor, Tensor]:
    """The rule on the last steps of two trajectories that share their noise: (latents [n], kept [n]).

    factor: whether the density of the target is multiplied by Sigma. After so many tries the last draw stays.
    """
    steps = range(2, len(target.beta) + 1)
    sigma = torch.stack([drafter.noise_std(t) / target.noise_std(t) for t in steps]).prod() if factor else 1.0
    x, mean_q = drafter.draw(noise)
    _, mean_p = target.draw(noise)
    std_p, std_q = target.noise_std(1), drafter.noise_std(1)
    kept = torch.rand_like(x) * normal(x, mean_q, std_q) < sigma * normal(x, mean_p, std_p)
    found, left, done = x.clone(), (~kept).nonzero()[:, 0], 0
    while len(left):
        y = mean_p[left] + std_p * torch.randn(len(left), dtype=x.dtype)
        odds = normal(y, mean_q[left], std_q) / (sigma * normal(y, mean_p[left], std_p))
        done += 1
        takes = (torch.rand_like(y) >= odds) | (done == tries)
        found[left[takes]] = y[takes]
        left = left[~takes]
    return found, kept


def exact(
    p: Tensor, q: Tensor, target: Diffusion, drafter: Diffusion, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """The exact rule on the densities p and q of x_0, which are on `GRID`: (latents [n], kept [n])."""
    x, _ = drafter.draw(noise)
    kept = torch.rand_like(x) * at(q, x) < at(p, x)
    found, left = x.clone(), (~kept).nonzero()[:, 0]
    while len(left):
        y, _ = target.draw(torch.randn(len(noise), len(left), dtype=x.dtype))
        takes = torch.rand_like(y) >= at(q, y) / at(p, y).clamp_min(1e-300)
        found[left[takes]] = y[takes]
        left = left[~takes]
    return found, kept


def variation(latents: Tensor, density: Tensor) -> float:
    """The total variation of drawn latents [n] from a density on `GRID`, over cells of 0.1."""
    expected = torch.zeros(len(CELLS) + 1).double()
    expected.index_add_(0, torch.bucketize(GRID, CELLS), density * (GRID[1] - GRID[0]))
    counts = torch.bincount(torch.bucketize(latents, CELLS), minlength=len(expected)) / len(latents)
    return (counts - expected).abs().sum().item() / 2


def models(steps: int, shift: float, wide: float) -> tuple[Diffusion, Diffusion]:
    """A target of two modes, and a drafter whose modes lie `shift` further to the right, and whose steps are wider."""
    angle = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    kept = ((angle + 0.1) / 1.1 * torch.pi / 2).cos().square()
    beta = (1 - kept[1:] / kept[:-1]).clamp(0.02, 0.98)
    weight, mean, std = torch.tensor([[0.6, 0.4], [-1.0, 1.2], [0.4, 0.3]], dtype=torch.float64)
    drafter = Diffusion(weight.flip(0), mean + shift, std * 1.2, beta, wide)
    return Diffusion(weight, mean, std, beta, 1.0), drafter


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=400_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| steps | shift | width | rule | accepted | total variation |\n|--:|--:|--:|---|--:|--:|")
    for steps, shift, wide in ((8, 0.1, 1.0), (8, 0.1, 1.05), (8, 0.4, 1.0), (25, 0.1, 1.0), (25, 0.1, 1.02)):
        target, drafter = models(steps, shift, wide)
        p, q = target.density(), drafter.density()
        torch.manual_seed(options.seed)
        noise = torch.randn(steps + 1, options.draws, dtype=torch.float64)
        plain = target.draw(torch.randn_like(noise))[0]
        rows = {
            "none, the target alone": (plain, None),
            "exact, on densities": exact(p, q, target, drafter, noise),
            "as published": published(target, drafter, noise, True, 3),
            "without Sigma, until one is kept": published(target, drafter, noise, False, None),
        }
        for name, (latents, kept) in rows.items():
            share = "" if kept is None else f"{kept.double().mean():.3f}"
            print(f"| {steps} | {shift} | {wide} | {name} | {share} | {variation(latents, p):.4f} |")


if __name__ == "__main__":
    main()
