"""EAGLE (arXiv 2401.15077): one decoder layer over [embedding of the next code ; target feature]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lanternpp.drafters.base import Drafter, DrafterConfig
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn.decoder import AttentionCache, Decoder
from lanternpp.types import Nodes


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
