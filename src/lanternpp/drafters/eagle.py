"""EAGLE (arXiv 2401.15077): one decoder layer over [embedding of the code one ahead ; target feature]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from lanternpp.drafters.base import Drafter, check_fit
from lanternpp.errors import InputError
from lanternpp.nn.configs import Epsilon, HeadDim, Heads, Hidden, Layers, Width, config_as
from lanternpp.nn.decoder import Decoder, DecoderConfig, Memory
from lanternpp.nn.sources import SAME, Source, blank
from lanternpp.targets.base import Target
from lanternpp.types import Nodes


@dataclass(frozen=True)
class EagleConfig:
    """The shape of an EAGLE drafter; dim, heads and hidden are its target's."""

    dim: Width
    heads: Heads
    hidden: Hidden
    layers: Layers = 1
    bias: bool = True
    first_norm: bool = True
    final_norm: bool = False
    kv_heads: Heads | None = None
    norm_eps: Epsilon = 1e-5
    qk_norm: bool = False
    head_dim: HeadDim = 0  # 0: dim / heads
    norm_after: bool = False
    attention_bias: bool = False
    ffn_bias: bool = False

    @classmethod
    def like(cls, shape: DecoderConfig, layers: int = 1) -> Self:
        """A drafter for a target of this shape, its layers like the target's."""
        return cls(
            shape.dim,
            shape.heads,
            shape.hidden,
            layers,
            kv_heads=shape.kv_heads,
            norm_eps=shape.norm_eps,
            qk_norm=shape.qk_norm,
            head_dim=shape.head_dim,
            norm_after=shape.norm_after,
            attention_bias=shape.attention_bias,
            ffn_bias=shape.ffn_bias,
        )


class EagleDrafter(Drafter):
    """fc(2D -> D), then the layer; embedding and head are the target's own, frozen."""

    about = "folders written by lanternpp train drafter"

    def __init__(self, config: EagleConfig, turns: Tensor):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.dim, config.dim, bias=config.bias)
        shape = DecoderConfig(
            config.dim,
            config.layers,
            config.heads,
            config.hidden,
            config.kv_heads,
            norm_eps=config.norm_eps,
            qk_norm=config.qk_norm,
            first_norm=config.first_norm,
            final_norm=config.final_norm,
            head_dim=config.head_dim,
            norm_after=config.norm_after,
            attention_bias=config.attention_bias,
            ffn_bias=config.ffn_bias,
        )
        self.decoder = Decoder(shape, turns)

    @classmethod
    def read(cls, source: Source, target: Target, dtype: torch.dtype) -> Self:
        """The drafter in `source` for this target."""
        config = config_as(EagleConfig, source.config, source.path)
        check_fit(source, config.dim, target)
        with blank(source.path):
            drafter = cls(config, target.decoder.turns)
        source.fill(drafter, [SAME], dtype)
        return drafter

    @torch.no_grad()
    def inherit(self, target: Target) -> None:
        """Begin as the target's last blocks, reading mostly the feature. InputError where it has too few."""
        blocks, own = list(target.decoder.blocks), self.decoder.blocks
        if len(own) > len(blocks):
            raise InputError(f"a drafter of {len(own)} layers cannot begin as the last of {len(blocks)}.")
        for mine, other in zip(own, blocks[-len(own) :], strict=True):
            mine.load_state_dict(other.state_dict())
        self.fc.weight[:, self.config.dim :] += torch.eye(self.config.dim)

    def forward(self, ahead: Tensor, features: Tensor, nodes: Nodes, cache: Memory) -> Tensor:
        """ahead [R, N, D], features [R, N, D] -> the features one ahead, [R, N, D]."""
        return self.decoder(self.fc(torch.cat((ahead, features), -1)), nodes, cache)

    def teach(self, ahead: Tensor, features: Tensor, seen: Tensor | None = None) -> Tensor:
        """The same over a whole sequence: [B, T, D] twice -> [B, T, D]; causal, or seen [B, 1, T, T]."""
        return self.decoder.teach(self.fc(torch.cat((ahead, features), -1)), seen=seen)
