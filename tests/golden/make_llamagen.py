"""Asks the authors' code what it says of the tiny checkpoints of `checkpoints.py`, and keeps the answers.

    git clone https://github.com/FoundationVision/LlamaGen
    PYTHONPATH=tests:LlamaGen python tests/golden/make_llamagen.py

writes `llamagen.safetensors` beside this file; the one kept is of commit ce98ec41803a (MIT licence) with torch 2.13.
Nothing of that repository is kept but logits and pixels.
"""

from __future__ import annotations

from pathlib import Path

import torch
from autoregressive.models.gpt import ModelArgs, Transformer, TransformerBlock, precompute_freqs_cis_2d
from helpers import checkpoints
from helpers.checkpoints import CODES, PARENTS, TREE_CODES
from safetensors.torch import save_file
from tokenizer.tokenizer_image.vq_model import Decoder, VectorQuantizer
from torch import Tensor, nn

GRID, SLOTS, STEPS = 4, 6, 6
PADDING = 2  # slots of padding before the text


def target(text: bool, heads: int) -> Transformer:
    """The authors' network with our weights."""
    args = ModelArgs(
        dim=64, n_layer=2, n_head=heads, n_kv_head=None, multiple_of=8, ffn_dim_multiplier=96 / 170,
        num_classes=checkpoints.CLASSES, caption_dim=checkpoints.CAPTION, vocab_size=checkpoints.VOCAB,
        cls_token_num=SLOTS if text else 1, block_size=GRID * GRID, model_type="t2i" if text else "c2i",
    )  # fmt: skip
    net = Transformer(args)
    if text:
        net.cls_embedding.uncond_embedding = torch.zeros(SLOTS, checkpoints.CAPTION)
    net.load_state_dict(checkpoints.llamagen(text))
    return net.eval()


def conditions(text: bool) -> Tensor:
    """A condition and the null condition."""
    if not text:
        return torch.tensor([7, checkpoints.CLASSES])
    features = checkpoints.numbers("a text", (SLOTS, checkpoints.CAPTION))
    features[:PADDING] = 0
    return torch.stack((features, checkpoints.llamagen(True)["cls_embedding.uncond_embedding"]))


def start(net: Transformer, text: bool, branches: Tensor) -> Tensor:
    """Prefill; the mask is the one that the authors' `generate` makes."""
    slots = SLOTS if text else 1
    net.setup_caches(len(branches), slots + GRID * GRID, torch.float32)
    if text:
        seen = torch.ones(SLOTS)
        seen[:PADDING] = 0
        mask = net.causal_mask.float()
        mask[:, :, :SLOTS] *= seen
        eye = torch.eye(mask.shape[1])
        net.causal_mask = (mask * (1 - eye) + eye).bool()
    return net(None, branches, torch.arange(slots))[0][:, -1]


def walk(net: Transformer, text: bool, branches: Tensor, codes: list[int]) -> Tensor:
    """Logits after the prompt and after each code, [1 + n, 2, V]."""
    slots = SLOTS if text else 1
    logits = [start(net, text, branches)]
    for i, code in enumerate(codes):
        given = torch.full((len(branches), 1), code)
        logits.append(net(given, None, torch.tensor([slots + i]))[0][:, 0])
    return torch.stack(logits)


def path(node: int) -> list[int]:
    """The codes from the root to a node."""
    return [*(path(PARENTS[node]) if PARENTS[node] >= 0 else []), int(TREE_CODES[node])]


def drafter() -> Tensor:
    """Features of a published drafter's layer, the authors' block without its first norm, at the last slot of a prompt and 5 more.

    LANTERN's drafters rotate by one slot less of zeros than their target: at its last slot a prompt meets the first code.
    """
    given = checkpoints.published_drafter(checkpoints.llamagen(True))
    args = ModelArgs(dim=64, n_head=1, multiple_of=8, ffn_dim_multiplier=96 / 170, norm_eps=1e-6)
    block = TransformerBlock(args, 0.0)
    block.attention_norm = nn.Identity()
    layer = {name.removeprefix("layers.0."): tensor for name, tensor in given.items()}
    weights = {
        "attention.wqkv.weight": torch.cat([layer[f"self_attn.{x}_proj.weight"] for x in "qkv"]),
        "attention.wo.weight": layer["self_attn.o_proj.weight"],
        "ffn_norm.weight": layer["post_attention_layernorm.weight"],
    }
    for theirs, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
        weights[f"feed_forward.{theirs}.weight"] = layer[f"mlp.{ours}_proj.weight"]
    block.load_state_dict(weights)
    pair = checkpoints.numbers("pairs", (SLOTS + 5, 128))[None]
    x = nn.functional.linear(pair, given["fc.weight"], given["fc.bias"])
    rotations = precompute_freqs_cis_2d(GRID, 64, 10000, SLOTS - 1)[: SLOTS + 5]
    return block.eval()(x, rotations, None)[0, SLOTS - 1 :]


@torch.no_grad()
def main() -> None:
    """Ask and keep."""
    kept: dict[str, Tensor] = {}
    for name, text, heads in (("c2i", False, 1), ("c2i heads", False, 4), ("t2i", True, 1)):
        net, branches = target(text, heads), conditions(text)
        kept[f"{name} steps"] = walk(net, text, branches, CODES.tolist())
        kept[f"{name} tree"] = torch.stack(
            [walk(net, text, branches, path(n))[-1] for n in range(len(PARENTS))]
        )
    kept["drafter"] = drafter()
    vq = nn.Module()
    given = checkpoints.vq16()
    vq.quantize = VectorQuantizer(checkpoints.VOCAB, 4, 0.25, 0.0, True, False)
    vq.post_quant_conv = nn.Conv2d(4, 16, 1)
    vq.decoder = Decoder(z_channels=16, ch=32, ch_mult=(1, 1, 1, 1, 2))
    skip = ("encoder.", "quant_conv.", "quantize.codebook_used")
    vq.load_state_dict({name: tensor for name, tensor in given.items() if not name.startswith(skip)})
    vq.eval()
    codes = torch.arange(2 * 4).view(2, 4) * 5 % checkpoints.VOCAB
    pixels = vq.decoder(vq.post_quant_conv(vq.quantize.get_codebook_entry(codes, (2, 4, 2, 2))))
    kept["vq pixels"] = pixels[:, :, ::2].contiguous()
    save_file(kept, Path(__file__).with_name("llamagen.safetensors"))


if __name__ == "__main__":
    main()
