"""Checkpoints in the layout of transformers' Llama: their config's fields and their tensors' names.

Queries and keys lie half against half there, as `rotate` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lanternpp.errors import InputError
from lanternpp.nn.configs import (
    Codes,
    Epsilon,
    HeadDim,
    Heads,
    Hidden,
    Layers,
    Positions,
    RopeBase,
    Width,
    config_as,
)
from lanternpp.nn.decoder import DecoderConfig
from lanternpp.nn.sources import Rename


@dataclass(frozen=True)
class Rope:
    """How a config describes its rotations: `rope_parameters` today, `rope_scaling` before."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: RopeBase | None = None


@dataclass(frozen=True)
class LlamaFields:
    """The fields of a config.json that describe a decoder, as transformers names them."""

    hidden_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    intermediate_size: Hidden
    rms_norm_eps: Epsilon
    vocab_size: Codes
    max_position_embeddings: Positions
    num_key_value_heads: Heads | None = None
    head_dim: HeadDim | None = None
    hidden_act: str = "silu"
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    rope_theta: RopeBase | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None

    def decoder(self, source: Path, **more: Any) -> DecoderConfig:
        """The decoder's shape; `more` are fields that its family adds. InputError where it cannot be made."""
        if self.hidden_act != "silu":
            raise InputError(f"{source}: hidden_act {self.hidden_act!r} is not supported; silu is")
        shape = {
            "dim": self.hidden_size,
            "layers": self.num_hidden_layers,
            "heads": self.num_attention_heads,
            "hidden": self.intermediate_size,
            "kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_dim": self.head_dim or 0,
            "norm_eps": self.rms_norm_eps,
            "attention_bias": bool(self.attention_bias),
            "ffn_bias": bool(self.mlp_bias),
        }
        return config_as(DecoderConfig, shape | more, source)

    def rope_base(self, source: Path, default: float = 10000.0) -> float:
        """The base of the rotations. InputError where they are not the plain ones."""
        rope = self.rope_parameters or self.rope_scaling or Rope()
        kind = rope.rope_type or rope.type or "default"
        if kind != "default":
            raise InputError(
                f"{source}: rotary embeddings of type {kind!r} are not supported; plain ones are"
            )
        return rope.rope_theta or self.rope_theta or default


def fields(config: Mapping[str, Any], source: Path, **defaults: Any) -> LlamaFields:
    """The decoder's part of a config.json; null is what is left out. InputError names a field that cannot be used."""
    return config_as(LlamaFields, defaults | {k: v for k, v in config.items() if v is not None}, source)


def llama_rules(
    shape: DecoderConfig,
    layer: str = r"(?:model\.)?layers\.(\d+)",
    block: str = r"blocks.\1",
    paired: bool = False,
    norm_rows: tuple[int, int] | None = None,
    rotated: int | None = None,
) -> list[Rename]:
    """`layer`, a regular expression with the layer's number as its one group, into `block`.

    paired: rotary pairs are neighbouring channels there, not half against half. rotated: how many channels of a head are
    rotated there, the first ones; default: all. norm_rows: how many rows the
    checkpoint's norms of queries and of keys have, each for as many neighbouring heads; default: one a head.
    """
    queries, keys, half = shape.heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.hidden
    change = f"halves:{shape.head_dim}" if paired else None
    if rotated is not None:
        change = f"outer:{shape.head_dim}:{rotated}"
    both, every, what = queries + keys, queries + 2 * keys, r"\.(weight|bias)"
    wqkv, w13 = rf"{block}.wqkv.\2", rf"{block}.w13.\2"
    return [
        Rename(rf"{layer}\.self_attn\.q_proj{what}", wqkv, part=(0, queries), change=change),
        Rename(rf"{layer}\.self_attn\.k_proj{what}", wqkv, part=(queries, both), change=change),
        Rename(rf"{layer}\.self_attn\.v_proj{what}", wqkv, part=(both, every)),
        Rename(rf"{layer}\.self_attn\.o_proj{what}", rf"{block}.wo.\2"),
        *_norms(shape, layer, block, norm_rows or (shape.heads, shape.num_kv_heads)),
        Rename(rf"{layer}\.mlp\.gate_proj{what}", w13, part=(0, half)),
        Rename(rf"{layer}\.mlp\.up_proj{what}", w13, part=(half, 2 * half)),
        Rename(rf"{layer}\.mlp\.down_proj{what}", rf"{block}.w2.\2"),
        Rename(rf"{layer}\.input_layernorm\.weight", f"{block}.attention_norm.weight"),
        Rename(rf"{layer}\.post_attention_layernorm\.weight", f"{block}.ffn_norm.weight"),
    ]


def _norms(shape: DecoderConfig, layer: str, block: str, rows: tuple[int, int]) -> list[Rename]:
    """The norms of queries and keys, a row for every head."""
    both, norms = (shape.heads, shape.num_kv_heads), []
    for name, heads, first, given in zip("qk", both, (0, shape.heads), rows, strict=True):
        norms.append(
            Rename(
                rf"{layer}\.self_attn\.{name}_norm\.(weight|bias)",
                rf"{block}.qk_norm.\2",
                rows=None if given == heads else torch.arange(heads) * given // heads,
                part=(first, first + heads),
            )
        )
    return norms
