"""Acceptance of drafts between two small diffusion heads, and the distance of the output from the target's distribution.

    python bench/diffusion_head.py [--draws 60000] [--steps 8 25]

The latents have two dimensions and three modes. The script trains both heads: the target's is larger; the drafter's is smaller, is
trained for a shorter time, and in half of the rows from wider modes, as a drafter that knows less would be. Three rules verify the
same drafts: the exact rule, the exact rule on trajectories without common noise, and the published rule (arXiv 2411.11925).
The total variation is measured over square cells, between the output and a second sample of the target.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Cspd, Exact
from lanternpp.engine.latent_decode import verify_latents
from lanternpp.engine.latents import DiffusionSampling
from lanternpp.engine.noise import Noise
from lanternpp.models.latents import Denoiser
from lanternpp.trees.static import chain_tree
from lanternpp.types import Draft

sys.path.append(str(Path(__file__).parents[1] / "recipes" / "nature"))
from losses import denoising_loss

CELL_SIDE, HALF_WIDTH = 0.4, 3.0  # of the square that is divided into cells
CHUNK = 50_000  # draws of a pass
RULES: tuple[tuple[str, Acceptance, bool], ...] = (
    ("exact", Exact(), True),
    ("exact, not aligned", Exact(), False),
    ("as published", Cspd(), True),
)


def sample_modes(count: int, std: float) -> Tensor:
    """Sample latents [count, 2] from three Gaussian modes."""
    angle = torch.randint(3, (count,)) * (2 * math.pi / 3)
    return 1.3 * torch.stack((angle.cos(), angle.sin()), -1) + std * torch.randn(count, 2)


def train(width: int, blocks: int, updates: int, std: float, batch_size: int = 512) -> Denoiser:
    """Train a head on latents from modes of the standard deviation `std`, and return it."""
    head = Denoiser(1, 2, width, blocks)
    optimizer = torch.optim.AdamW(head.parameters(), 3e-3, weight_decay=0)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - update / updates)
        optimizer.zero_grad()
        denoising_loss(head, torch.zeros(batch_size, 1), sample_modes(batch_size, std), 4).mean().backward()
        optimizer.step()
    return head.requires_grad_(False)


def draw_verified(
    target: DiffusionSampling, drafter: DiffusionSampling, rule: Acceptance, aligned: bool, draws: int
) -> tuple[Tensor, float]:
    """Return latents [draws, 2], each decided by verifying one draft, and the share of accepted drafts."""
    latents, num_accepted = [], 0
    for first in range(0, draws, CHUNK):
        noise = Noise(torch.arange(first, min(first + CHUNK, draws)), torch.ones((), dtype=torch.int64))
        noise = Noise(noise.seed, noise.step.expand_as(noise.seed))
        condition = torch.zeros(len(noise.seed), 2, 1)
        step_noise = drafter.noise(noise, Noise.DRAFT, 1)
        last = drafter.last_step(condition[:, :1], step_noise)
        drafted = drafter.end(last, step_noise)
        codes = torch.cat((torch.zeros_like(drafted), drafted), 1)
        draft = Draft(chain_tree(len(codes), 1, codes.device), codes, last.expand(-1, 2, -1))
        if not aligned:
            noise = Noise(noise.seed, noise.step + 1)
        verdict = verify_latents(draft, condition, target, rule, noise)
        latents.append(verdict.next_codes[:, 0])
        num_accepted += int((verdict.kept == 2).sum())
    return torch.cat(latents), num_accepted / draws


def draw_plain(target: DiffusionSampling, draws: int, first_seed: int) -> Tensor:
    """Return latents [draws, 2] of a head without drafts, by consecutive seeds."""
    latents = []
    for seeds in torch.arange(first_seed, first_seed + draws).split(CHUNK):
        noise = Noise(seeds, torch.full_like(seeds, 7))
        latents.append(target.children(torch.zeros(len(seeds), 1, 1), 1, noise, Noise.DRAFT)[:, 0, 0])
    return torch.cat(latents)


def variation(a: Tensor, b: Tensor) -> float:
    """Return the total variation of two samples [n, 2], over cells."""
    side = int(2 * HALF_WIDTH / CELL_SIDE)
    counts = []
    for x in (a, b):
        cell = ((x + HALF_WIDTH) / CELL_SIDE).long().clamp(0, side - 1)  # [n, 2]
        counts.append(torch.bincount(cell @ torch.tensor([side, 1]), minlength=side**2))
    return (counts[0] - counts[1]).abs().sum().item() / (2 * len(a))


def main() -> None:
    """Train the heads, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=60_000)
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 25])
    options = parser.parse_args()
    torch.manual_seed(0)
    target_head = train(64, 2, 800, 0.25)
    drafter_heads = {std: train(24, 1, 250, std) for std in (0.25, 0.32)}
    print("| steps | drafter's modes | rule | accepted | total variation |\n|--:|--:|---|--:|--:|")
    for steps in options.steps:
        target = DiffusionSampling(1.0, 0, 1.0, 2, steps, denoiser=target_head)
        reference = draw_plain(target, options.draws, 0)
        distance = variation(draw_plain(target, options.draws, 1 << 40), reference)
        print(f"| {steps} | | none, the target alone | | {distance:.4f} |")
        for std, head in drafter_heads.items():
            drafter = DiffusionSampling(1.0, 0, 1.0, 2, steps, denoiser=head)
            distance = variation(draw_plain(drafter, options.draws, 1 << 41), reference)
            print(f"| {steps} | {std} | none, the drafter alone | | {distance:.4f} |")
            for name, rule, aligned in RULES:
                latents, rate = draw_verified(target, drafter, rule, aligned, options.draws)
                distance = variation(latents, reference)
                print(f"| {steps} | {std} | {name} | {rate:.3f} | {distance:.4f} |", flush=True)


if __name__ == "__main__":
    main()
