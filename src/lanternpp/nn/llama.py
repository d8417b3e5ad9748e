"""The names of tensors in the layout of transformers' Llama, which LlamaGen's copies and published drafters have."""

from __future__ import annotations

import torch

from lanternpp.nn.decoder import DecoderConfig
from lanternpp.nn.sources import Rename


def llama_rules(
    shape: DecoderConfig,
    layer: str,
    block: str,
    paired: bool = False,
    norm_rows: tuple[int, int] | None = None,
) -> list[Rename]:
    """`layer`, a regular expression with the layer's number as its one group, into `block`.

    paired: rotary pairs are neighbouring channels there, not half against half. norm_rows: how many rows the checkpoint's norms of
    queries and of keys have, each for as many neighbouring heads; default: one a head.
    """
    queries, keys, half = shape.heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.hidden
    halves = shape.head_dim if paired else 0
    both, every, what = queries + keys, queries + 2 * keys, r"\.(weight|bias)"
    wqkv, w13 = rf"{block}.wqkv.\2", rf"{block}.w13.\2"
    norms, heads = [], (shape.heads, shape.num_kv_heads)
    for name, count, first, given in zip("qk", heads, (0, shape.heads), norm_rows or heads, strict=True):
        rows = None if given == count else torch.arange(count) * given // count
        pattern = rf"{layer}\.self_attn\.{name}_norm\.(weight|bias)"
        norms.append(Rename(pattern, rf"{block}.qk_norm.\2", rows, (first, first + count)))
    return [
        Rename(rf"{layer}\.self_attn\.q_proj{what}", wqkv, part=(0, queries), halves=halves),
        Rename(rf"{layer}\.self_attn\.k_proj{what}", wqkv, part=(queries, both), halves=halves),
        Rename(rf"{layer}\.self_attn\.v_proj{what}", wqkv, part=(both, every)),
        Rename(rf"{layer}\.self_attn\.o_proj{what}", rf"{block}.wo.\2"),
        *norms,
        Rename(rf"{layer}\.mlp\.gate_proj{what}", w13, part=(0, half)),
        Rename(rf"{layer}\.mlp\.up_proj{what}", w13, part=(half, 2 * half)),
        Rename(rf"{layer}\.mlp\.down_proj{what}", rf"{block}.w2.\2"),
        Rename(rf"{layer}\.input_layernorm\.weight", f"{block}.attention_norm.weight"),
        Rename(rf"{layer}\.post_attention_layernorm\.weight", f"{block}.ffn_norm.weight"),
    ]
