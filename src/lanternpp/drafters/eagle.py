"""EAGLE (arXiv 2401.15077): one decoder layer over [embedding of the next code ; target feature].

A drafter of continuous latents has a diffusion head of its own (arXiv 2411.11925).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lanternpp.drafters.base import Drafter, DrafterConfig
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.models.latents import Denoiser
from lanternpp.nn.checkpoints import Width
from lanternpp.nn.decoder import AttentionCache, Decoder
from lanternpp.nn.sources import Source
from lanternpp.types import Nodes
from lanternpp.util.jsonfile import Between

DIFFUSION_DRAFTER = "eagle-diffusion"  # the `kind` of a drafter with a diffusion head


@dataclass(frozen=True)
class EagleConfig(DrafterConfig):
    """The shape of an EAGLE drafter, whose layers are like its target's."""

    bias: bool = True

    chosen: ClassVar[dict[str, Any]] = {"layers": 1, "first_norm": True, "final_norm": False}


class EagleDrafter(Drafter):
    """fc(2D -> D), then the layer; embedding and head are the target's own, frozen."""

    config_class = EagleConfig
    about = "folders written by lanternpp train --kind eagle"

    def __init__(self, config: EagleConfig, rotary_table: Tensor):
        super().__init__()
        self.config = config
        dim = config.decoder.dim
        self.fc = nn.Linear(2 * dim, dim, bias=config.bias)
        self.decoder = Decoder(config.decoder, rotary_table)

    def forward(self, next_embeds: Tensor, features: Tensor, nodes: Nodes, cache: AttentionCache) -> Tensor:
        """next_embeds [R, N, D], features [R, N, D] -> the features at the next positions, [R, N, D]."""
        return self.decoder(self.fc(torch.cat((next_embeds, features), -1)), nodes, cache)

    def forward_sequence(self, next_embeds: Tensor, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """next_embeds [B, T, D], features [B, T, D] -> features of a sequence, [B, T, D]; mask [B, 1, T, T]: the mask; None: causal."""
        return self.decoder.forward_sequence(self.fc(torch.cat((next_embeds, features), -1)), mask=mask)


@dataclass(frozen=True)
class DiffusionDrafterConfig(EagleConfig):
    """The shape of an EAGLE drafter with a diffusion head of its own."""

    channels: Width = 16  # C
    denoiser_width: Width = 128
    denoiser_blocks: Annotated[int, Between(1, 64)] = 1


class DiffusionDrafter(EagleDrafter):
    """EAGLE's drafter, with a smaller diffusion head that reads the predicted features."""

    config_class = DiffusionDrafterConfig
    proposer = "lanternpp.proposers.tree:TrajectoryProposer"
    config: DiffusionDrafterConfig

    def __init__(self, config: DiffusionDrafterConfig, rotary_table: Tensor):
        super().__init__(config, rotary_table)
        self.denoiser = Denoiser(
            config.decoder.dim, config.channels, config.denoiser_width, config.denoiser_blocks
        )

    @classmethod
    def read(cls, source: Source, target: Target, dtype: torch.dtype) -> Self:
        """Read the drafter, its head in float32 or more. InputError where the target has no such head, or other latents."""
        drafter = super().read(source, target, dtype)
        check_heads(target, drafter, source.path)
        drafter.denoiser.to(torch.promote_types(dtype, torch.float32))
        return drafter


def check_heads(target: Target, drafter: Any, name: Path | str = "the drafter") -> None:
    """Check that a target and its drafter both have diffusion heads, over latents of the same size, or neither; raise InputError otherwise."""
    has_head = hasattr(drafter, "denoiser")
    if has_head != hasattr(target, "denoiser"):
        fault = "has a diffusion head, which this model has not" if has_head else "has no diffusion head"
        raise InputError(
            f"{name} {fault}; use one that `lanternpp train --kind eagle` trained for this model"
        )
    if has_head and drafter.config.channels != target.channels:
        raise InputError(
            f"{name} draws latents of {drafter.config.channels} channels and the target of {target.channels}; use a "
            "drafter trained for this target"
        )
