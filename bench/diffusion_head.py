"""Drafting between two diffusion heads that were trained here: what is kept, and how far what is drawn is from the target's distribution.

The latents have two dimensions and three modes. The target's head is the larger one, the drafters' are smaller and learned for a
shorter time, one of them from modes that are wider, as those of a drafter are which knows less. The same drafts are verified by the exact rule, by the same on trajectories that share no noise, and as published
(arXiv 2411.11925); distances are those from other draws of the target itself, over square cells.
`python bench/diffusion_head.py` prints a table.
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
from lanternpp.engine.latents import DiffusionSampling
from lanternpp.engine.noise import Noise
from lanternpp.engine.verify.latents import verify_trajectories
from lanternpp.models.latents import Denoiser
from lanternpp.trees.chain import chain_tree
from lanternpp.types import Draft

sys.path.append(str(Path(__file__).parents[1] / "recipes" / "nature"))
from losses import denoising_loss

CELL, WIDE, PART = 0.4, 3.0, 50_000
RULES: tuple[tuple[str, Acceptance, bool], ...] = (
    ("exact", Exact(), True),
    ("exact, not aligned", Exact(), False),
    ("as published", Cspd(), True),
)


def real(count: int, std: float) -> Tensor:
    """Latents around three modes, [count, 2]."""
    angle = torch.randint(3, (count,)) * (2 * math.pi / 3)
    return 1.3 * torch.stack((angle.cos(), angle.sin()), -1) + std * torch.randn(count, 2)


def trained(width: int, blocks: int, updates: int, std: float, batch: int = 512) -> Denoiser:
    """A head after so many updates on latents around modes of this width."""
    head = Denoiser(1, 2, width, blocks)
    optimizer = torch.optim.AdamW(head.parameters(), 3e-3, weight_decay=0)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - update / updates)
        optimizer.zero_grad()
        denoising_loss(head, torch.zeros(batch, 1), real(batch, std), 4).mean().backward()
        optimizer.step()
    return head.requires_grad_(False)


def verified(
    target: DiffusionSampling, drafter: DiffusionSampling, rule: Acceptance, aligned: bool, draws: int
) -> tuple[Tensor, float]:
    """Latents [draws, 2] that were decided by verifying one draft each, and the share of drafts kept."""
    found, kept = [], 0
    for first in range(0, draws, PART):
        noise = Noise(torch.arange(first, min(first + PART, draws)), torch.ones((), dtype=torch.int64))
        noise = Noise(noise.seed, noise.step.expand_as(noise.seed))
        law, every = torch.zeros(len(noise.seed), 2, 1), drafter.noise(noise, Noise.DRAFT, 1)
        last = drafter.last_step(law[:, :1], every)
        drafted = drafter.end(last, every)
        codes = torch.cat((torch.zeros_like(drafted), drafted), 1)
        draft = Draft(chain_tree(len(codes), 1, codes.device), codes, last.expand(-1, 2, -1))
        verdict = verify_trajectories(draft, law, target, rule, noise, aligned=aligned)
        found.append(verdict.next_codes[:, 0])
        kept += int((verdict.kept == 2).sum())
    return torch.cat(found), kept / draws


def plain(target: DiffusionSampling, draws: int, first: int) -> Tensor:
    """Latents [draws, 2] of the target alone, by seeds from `first` on."""
    found = []
    for part in torch.arange(first, first + draws).split(PART):
        noise = Noise(part, torch.full_like(part, 7))
        found.append(target.children(torch.zeros(len(part), 1, 1), 1, noise, Noise.DRAFT)[:, 0, 0])
    return torch.cat(found)


def variation(a: Tensor, b: Tensor) -> float:
    """The total variation of two samples [n, 2], over cells."""
    side = int(2 * WIDE / CELL)
    first, second = (
        torch.bincount(
            ((x + WIDE) / CELL).long().clamp(0, side - 1) @ torch.tensor([side, 1]), minlength=side**2
        )
        for x in (a, b)
    )
    return (first - second).abs().sum().item() / (2 * len(a))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=60_000)
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 25])
    options = parser.parse_args()
    torch.manual_seed(0)
    ours = trained(64, 2, 800, 0.25)
    theirs = {std: trained(24, 1, 250, std) for std in (0.25, 0.32)}
    print("| steps | drafter's modes | rule | kept | total variation |\n|--:|--:|---|--:|--:|")
    for steps in options.steps:
        target = DiffusionSampling(1.0, 0, 1.0, 2, steps, denoiser=ours)
        other = plain(target, options.draws, 0)
        alone = variation(plain(target, options.draws, 1 << 40), other)
        print(f"| {steps} | | none, the target alone | | {alone:.4f} |")
        for std, head in theirs.items():
            drafter = DiffusionSampling(1.0, 0, 1.0, 2, steps, denoiser=head)
            alone = variation(plain(drafter, options.draws, 1 << 41), other)
            print(f"| {steps} | {std} | none, the drafter alone | | {alone:.4f} |")
            for name, rule, aligned in RULES:
                found, kept = verified(target, drafter, rule, aligned, options.draws)
                print(
                    f"| {steps} | {std} | {name} | {kept:.3f} | {variation(found, other):.4f} |", flush=True
                )


if __name__ == "__main__":
    main()
