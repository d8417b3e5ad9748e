"""EAGLE (arXiv 2401.15077): one decoder layer over [embedding of the next code ; target feature].

Of continuous latents it has a diffusion head of its own (arXiv 2411.11925).
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

    @torch.no_grad()
    def inherit(self, target: Target) -> None:
        """Initialise from the target's last blocks, and `fc` to pass the feature on. InputError where it has too few blocks."""
        blocks, own = list(target.decoder.blocks), self.decoder.blocks
        if len(own) > len(blocks):
            raise InputError(f"a drafter of {len(own)} layers cannot begin as the last of {len(blocks)}.")
        for mine, other in zip(own, blocks[-len(own) :], strict=True):
            mine.load_state_dict(other.state_dict())
        self.fc.weight[:, self.config.decoder.dim :] += torch.eye(self.config.decoder.dim)

    def forward(self, next_embeds: Tensor, features: Tensor, nodes: Nodes, cache: AttentionCache) -> Tensor:
        """next_embeds [R, N, D], features [R, N, D] -> the features at the next positions, [R, N, D]."""
        return self.decoder(self.fc(torch.cat((next_embeds, features), -1)), nodes, cache)

    def forward_sequence(self, next_embeds: Tensor, features: Tensor, seen: Tensor | None = None) -> Tensor:
        """The same over a whole sequence: [B, T, D] twice -> [B, T, D]; causal, or seen [B, 1, T, T]."""
        return self.decoder.forward_sequence(self.fc(torch.cat((next_embeds, features), -1)), seen=seen)


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
