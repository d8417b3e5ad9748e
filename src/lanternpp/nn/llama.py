"""Checkpoints in the layout of transformers' Llama: their config's fields and their tensors' names.

Queries and keys lie half against half there, as `rotate` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lanternpp.errors import InputError
from lanternpp.nn.decoder import DecoderConfig
from lanternpp.nn.sources import Rename

FIELDS = {
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
}


def field(config: Mapping[str, Any], name: str, source: Path) -> Any:
    """A field of a config.json; InputError where it is missing or null."""
    value = config.get(name)
    if value is None:
        raise InputError(f"{source}: config.json lacks {name}; fetch it again from the model's repository")
    return value


def decoder_config(config: Mapping[str, Any], source: Path, **more: Any) -> DecoderConfig:
    """The decoder a config.json describes; `more` are fields that its family adds."""
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise InputError(f"{source}: hidden_act {act!r} is not supported; silu is")
    given: dict[str, Any] = {ours: int(field(config, theirs, source)) for ours, theirs in FIELDS.items()}
    return DecoderConfig(
        **given,
        kv_heads=int(config.get("num_key_value_heads") or given["heads"]),
        head_dim=int(config.get("head_dim") or 0),
        norm_eps=float(field(config, "rms_norm_eps", source)),
        attention_bias=bool(config.get("attention_bias")),
        ffn_bias=bool(config.get("mlp_bias")),
        **more,
    )


def rope_base(config: Mapping[str, Any], source: Path, default: float = 10000.0) -> float:
    """The base of the rotations, as older (`rope_theta`) and newer (`rope_parameters`) configs write it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise InputError(f"{source}: rotary embeddings of type {kind!r} are not supported; plain ones are")
    return float(rope.get("rope_theta") or config.get("rope_theta") or default)


def rules(prefix: str, shape: DecoderConfig, norm_groups: tuple[int, int] | None = None) -> list[Rename]:
    """Names below `prefix` (a regular expression) as those of a module's `decoder`.

    norm_groups: how many rows the checkpoint's norms of queries and of keys have, each shared by as many
    neighbouring heads; default: one a head.
    """
    layer, block = prefix + r"layers\.(\d+)\.", r"decoder.blocks.\1."
    queries, keys = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    found = [Rename(prefix + r"norm\.weight", "decoder.norm.weight")]
    first = 0
    for name, count in (("q", queries), ("k", keys), ("v", keys)):
        part = (first, first + count)
        found.append(Rename(rf"{layer}self_attn\.{name}_proj\.(weight|bias)", rf"{block}wqkv.\2", part=part))
        first += count
    first = 0
    for name, heads, rows in zip("qk", (shape.heads, shape.groups), norm_groups or (0, 0), strict=True):
        shared = torch.arange(heads) * rows // heads if rows and rows != heads else None
        found.append(
            Rename(
                rf"{layer}self_attn\.{name}_norm\.(weight|bias)",
                rf"{block}qk_norm.\2",
                rows=shared,
                part=(first, first + heads),
            )
        )
        first += heads
    return [
        *found,
        Rename(rf"{layer}self_attn\.o_proj\.(weight|bias)", rf"{block}wo.\2"),
        Rename(rf"{layer}mlp\.gate_proj\.(weight|bias)", rf"{block}w13.\2", part=(0, shape.hidden)),
        Rename(
            rf"{layer}mlp\.up_proj\.(weight|bias)", rf"{block}w13.\2", part=(shape.hidden, 2 * shape.hidden)
        ),
        Rename(rf"{layer}mlp\.down_proj\.(weight|bias)", rf"{block}w2.\2"),
        Rename(rf"{layer}input_layernorm\.weight", rf"{block}attention_norm.weight"),
        Rename(rf"{layer}post_attention_layernorm\.weight", rf"{block}ffn_norm.weight"),
    ]
