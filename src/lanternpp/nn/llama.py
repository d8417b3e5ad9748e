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


def llama_rules(
    shape: DecoderConfig,
    layer: str = r"(?:model\.)?layers\.(\d+)",
    block: str = r"blocks.\1",
    paired: bool = False,
    norm_rows: tuple[int, int] | None = None,
) -> list[Rename]:
    """`layer`, a regular expression with the layer's number as its one group, into `block`.

    paired: rotary pairs are neighbouring channels there, not half against half. norm_rows: how many rows the
    checkpoint's norms of queries and of keys have, each for as many neighbouring heads; default: one a head.
    """
    queries, keys, half = shape.heads * shape.head_dim, shape.groups * shape.head_dim, shape.hidden
    change = f"halves:{shape.head_dim}" if paired else None
    turned, every, what = queries + keys, queries + 2 * keys, r"\.(weight|bias)"
    wqkv, w13 = rf"{block}.wqkv.\2", rf"{block}.w13.\2"
    return [
        Rename(rf"{layer}\.self_attn\.q_proj{what}", wqkv, part=(0, queries), change=change),
        Rename(rf"{layer}\.self_attn\.k_proj{what}", wqkv, part=(queries, turned), change=change),
        Rename(rf"{layer}\.self_attn\.v_proj{what}", wqkv, part=(turned, every)),
        Rename(rf"{layer}\.self_attn\.o_proj{what}", rf"{block}.wo.\2"),
        *_norms(shape, layer, block, norm_rows or (shape.heads, shape.groups)),
        Rename(rf"{layer}\.mlp\.gate_proj{what}", w13, part=(0, half)),
        Rename(rf"{layer}\.mlp\.up_proj{what}", w13, part=(half, 2 * half)),
        Rename(rf"{layer}\.mlp\.down_proj{what}", rf"{block}.w2.\2"),
        Rename(rf"{layer}\.input_layernorm\.weight", f"{block}.attention_norm.weight"),
        Rename(rf"{layer}\.post_attention_layernorm\.weight", f"{block}.ffn_norm.weight"),
    ]


def _norms(shape: DecoderConfig, layer: str, block: str, rows: tuple[int, int]) -> list[Rename]:
    """The norms of queries and keys, a row for every head."""
    both, norms = (shape.heads, shape.groups), []
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
