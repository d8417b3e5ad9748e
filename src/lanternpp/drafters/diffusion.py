"""An EAGLE drafter of continuous latents, with a diffusion head of its own (arXiv 2411.11925)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from torch import Tensor

from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.models.latents import Denoiser
from lanternpp.nn.checkpoints import Width
from lanternpp.nn.sources import Source
from lanternpp.util.schema import Between

DRAFTER = "eagle-diffusion"  # a config's `kind`


@dataclass(frozen=True)
class DiffusionDrafterConfig(EagleConfig):
    """The shape of an EAGLE drafter with a diffusion head of its own."""

    channels: Width = 16  # C
    denoiser_width: Width = 128
    denoiser_blocks: Annotated[int, Between(1, 64)] = 1


class DiffusionDrafter(EagleDrafter):
    """EAGLE's drafter, with a smaller diffusion head that reads the predicted features."""

    config_class = DiffusionDrafterConfig
    proposer = "lanternpp.proposers.trajectories:TrajectoryProposer"
    config: DiffusionDrafterConfig

    def __init__(self, config: DiffusionDrafterConfig, rotary_table: Tensor):
        super().__init__(config, rotary_table)
        self.denoiser = Denoiser(
            config.decoder.dim, config.channels, config.denoiser_width, config.denoiser_blocks
        )

    @classmethod
    def read(cls, source: Source, target: Target, dtype: torch.dtype) -> Self:
        """As the base class reads it, the head as the target's. InputError where that has none, or other latents."""
        drafter = super().read(source, target, dtype)
        check_heads(target, drafter, source.path)
        drafter.denoiser.to(torch.promote_types(dtype, torch.float32))
        return drafter


def check_heads(target: Target, drafter: Any, named: Path | str = "the drafter") -> None:
    """InputError unless both a target and its drafter have diffusion heads, over latents of the same size, or neither."""
    heads = hasattr(target, "denoiser"), hasattr(drafter, "denoiser")
    if heads[0] != heads[1]:
        having = "has a diffusion head, which this model has not" if heads[1] else "has no diffusion head"
        raise InputError(
            f"{named} {having}; use one that `lanternpp train --kind eagle` trained for this model"
        )
    if all(heads) and drafter.config.channels != target.channels:
        raise InputError(
            f"{named} draws latents of {drafter.config.channels} channels and the target of {target.channels}; use a "
            "drafter trained for this target"
        )
