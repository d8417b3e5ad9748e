"""What products with weights in 8 bits round their inputs to."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

# Kinds of CPU that multiply numbers of 8 bits, with a scale for every 64 inputs; others have inputs of 16 bits.
GROUPED = ("avx512-vnni", "avx512-bf16", "avx-vnni", "emulated bfloat16", "armv8.2-dotprod")
GROUP = 64


def groups_inputs(library: object) -> bool:
    """Whether inputs have 8 bits too, which is coarser than bfloat16."""
    return Path(library._name).stem.startswith(GROUPED)


def attends_with_tiles(library: object) -> bool:
    """Whether many queries attend with the tiles of AMX."""
    return Path(library._name).stem.startswith(("amx", "emulated tiles"))


def multiplied(x: Tensor, library: object) -> Tensor:
    """Inputs x [..., n] of a layer with weights in 8 bits -> the numbers that its weights are multiplied with, in float64.

    Those of 16 bits are x itself, up to a share of a row's largest input.
    """
    if not groups_inputs(library):
        return x.double()
    groups = F.pad(x.float(), (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    # The product is rounded once, to a whole number; in float32 it would often become half of one before.
    whole = torch.where(scale > 0, (groups.double() * (1 / scale).double()).round(), 0)
    return (whole * scale.double()).flatten(-2)[..., : x.shape[-1]]
