"""The names that transformers gives a Llama's layers, mapped into a `Decoder`'s blocks."""

from __future__ import annotations

from lanternpp.nn.decoder import DecoderConfig
from lanternpp.nn.sources import Rename


def llama_rules(
    shape: DecoderConfig,
    layer: str = r"(?:model\.)?layers\.(\d+)",
    block: str = r"blocks.\1",
    paired: bool = False,
) -> list[Rename]:
    """`layer`, a pattern with the layer's number as its one group, into `block`.

    paired: rotary pairs are neighbouring channels there, not half against half.
    """
    queries, keys = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    change = f"halves:{shape.head_dim}" if paired else None
    wqkv, w13 = f"{block}.wqkv.weight", f"{block}.w13.weight"
    turned, every, half = queries + keys, queries + 2 * keys, shape.hidden
    return [
        Rename(rf"{layer}\.self_attn\.q_proj\.weight", wqkv, part=(0, queries), change=change),
        Rename(rf"{layer}\.self_attn\.k_proj\.weight", wqkv, part=(queries, turned), change=change),
        Rename(rf"{layer}\.self_attn\.v_proj\.weight", wqkv, part=(turned, every)),
        Rename(rf"{layer}\.self_attn\.o_proj\.weight", f"{block}.wo.weight"),
        Rename(rf"{layer}\.mlp\.gate_proj\.weight", w13, part=(0, half)),
        Rename(rf"{layer}\.mlp\.up_proj\.weight", w13, part=(half, 2 * half)),
        Rename(rf"{layer}\.mlp\.down_proj\.weight", f"{block}.w2.weight"),
        Rename(rf"{layer}\.input_layernorm\.weight", f"{block}.attention_norm.weight"),
        Rename(rf"{layer}\.post_attention_layernorm\.weight", f"{block}.ffn_norm.weight"),
    ]
