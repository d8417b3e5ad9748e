"""Tiny checkpoints in the layouts that others publish, with weights that a formula gives.

The formula needs no generator and no file: the same names and shapes give the same numbers everywhere, so
the outputs of upstream code for such a checkpoint can be stored without the checkpoint (`golden/`).
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lanternpp.models.vq.layouts import LLAMAGEN, TAMING, Names, layers
from lanternpp.models.vq.vqgan import VQGAN, VQGANConfig, VQGANEncoder
from lanternpp.nn.sources import blank

VOCAB, CLASSES, CAPTION = 48, 10, 24
CODES = torch.tensor([5, 17, 3, 40, 8, 21])  # drawn one after another
PARENTS = [-1, 0, 0, 1, 1, 2, 3]  # of a draft
TREE_CODES = torch.tensor([5, 17, 30, 3, 9, 44, 12])


def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    """Uniform-looking float32 numbers: matrices of unit gain, norms near 1, biases small."""
    count = torch.Size(shape).numel()
    seed = zlib.crc32(name.encode()) % 10007
    x = (torch.sin(torch.arange(count, dtype=torch.float64) * 12.9898 + seed * 0.731) * 43758.5453).frac()
    if len(shape) == 1:
        x = x * 0.2 + (1.0 if name.endswith("weight") else 0.0)
    else:
        x = x * (3 / torch.Size(shape[1:]).numel()) ** 0.5
    return x.float().view(shape)


def tensors_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """A checkpoint of these shapes."""
    return {name: numbers(name, shape) for name, shape in shapes.items()}


def llamagen(text: bool = False, dim: int = 64) -> dict[str, Tensor]:
    """LlamaGen's own layout; `text`: of 24 features a token, else of ten classes."""
    hidden = 96
    shapes: dict[str, tuple[int, ...]] = {}
    if text:
        shapes["cls_embedding.uncond_embedding"] = (6, CAPTION)
        shapes["cls_embedding.cap_proj.fc1.weight"] = (dim, CAPTION)
        shapes["cls_embedding.cap_proj.fc2.weight"] = (dim, dim)
    else:
        shapes["cls_embedding.embedding_table.weight"] = (CLASSES + 1, dim)
    shapes["tok_embeddings.weight"] = (VOCAB, dim)
    for i in range(2):
        shapes |= {
            f"layers.{i}.attention.wqkv.weight": (3 * dim, dim),
            f"layers.{i}.attention.wo.weight": (dim, dim),
            f"layers.{i}.feed_forward.w1.weight": (hidden, dim),
            f"layers.{i}.feed_forward.w3.weight": (hidden, dim),
            f"layers.{i}.feed_forward.w2.weight": (dim, hidden),
            f"layers.{i}.attention_norm.weight": (dim,),
            f"layers.{i}.ffn_norm.weight": (dim,),
        }
    tensors = tensors_of(shapes | {"norm.weight": (dim,), "output.weight": (VOCAB, dim)})
    tensors["output.weight"] *= 2  # some codes are clearly more probable than others
    return tensors


def llama_named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same target under the names of transformers' Llama, with separate projections."""
    names = {
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "tok_embeddings": "embed_tokens",
    }
    copied = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        if name.endswith("attention.wqkv.weight"):
            dim = tensor.shape[1]
            keys = (len(tensor) - dim) // 2
            for which, part in zip("qkv", tensor.split([dim, keys, keys]), strict=True):
                copied[f"model.{name.replace('attention.wqkv', f'self_attn.{which}_proj')}"] = part.clone()
        elif name == "output.weight":
            copied["lm_head.weight"] = tensor
        else:
            copied[f"model.{name}"] = tensor
    return copied


def published_drafter(target: dict[str, Tensor], hidden: int = 96) -> dict[str, Tensor]:
    """An EAGLE drafter as its own code names it, for a target in the official layout.

    LANTERN's training copies the head of a target that is one file into the drafter's table.
    """
    table = target.get("output.weight", target["tok_embeddings.weight"])
    dim = table.shape[1]
    layer = "layers.0"
    shapes = {f"{layer}.self_attn.{x}_proj.weight": (dim, dim) for x in "qkvo"}
    shapes |= {f"{layer}.mlp.{x}_proj.weight": (hidden, dim) for x in ("gate", "up")}
    shapes |= {f"{layer}.mlp.down_proj.weight": (dim, hidden), "fc.weight": (dim, 2 * dim), "fc.bias": (dim,)}
    return tensors_of(shapes | {f"{layer}.post_attention_layernorm.weight": (dim,)}) | {
        "embed_tokens.weight": table
    }


def write_drafter(folder: Path, text: bool = False) -> Path:
    """A published drafter's folder for the tiny LlamaGen."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(published_drafter(llamagen(text)), folder / "pytorch_model.bin")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 1,
        "rms_norm_eps": 1e-6,
        "input_type": "t2i",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def vqgan_shapes(
    config: VQGANConfig, encoder: bool = False, names: Names = TAMING
) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a VQ decoder in a layout; encoder: and of the encoder.

    Names are those that our rules accept. Tensors of other names have other numbers than those of the authors' pictures.
    """
    shapes: dict[str, tuple[int, ...]] = {"quantize.embedding.weight": (config.codes, config.dim)}
    for kind in (VQGAN, VQGANEncoder) if encoder else (VQGAN,):
        with blank():
            module = kind(config)
        for _, name, layer in layers(module, names):
            for parameter, tensor in layer.named_parameters():
                split = [name.replace(".qkv", f".{part}") for part in "qkv"] if ".qkv" in name else [name]
                rows = len(tensor) // len(split)
                shapes |= {f"{part}.{parameter}": (rows, *tensor.shape[1:]) for part in split}
    return shapes


def vq16() -> dict[str, Tensor]:
    """LlamaGen's tokenizer: its decoder, and a few tensors that drawing does not need."""
    config = VQGANConfig(codes=VOCAB, dim=4, channels=32, multiples=(1, 1, 1, 1, 2), latent=16)
    unread = {"quant_conv.weight": (16, 4, 1, 1), "encoder.conv_in.weight": (3, 32, 3, 3)}
    tensors = tensors_of(vqgan_shapes(config, names=LLAMAGEN) | unread)
    tensors["decoder.conv_out.weight"] *= 0.2  # most pixels within [-1, 1]
    return tensors | {"quantize.codebook_used": torch.zeros(16)}


def t5(folder: Path) -> Path:
    """A T5 of random weights with a tokenizer of ten words, as a folder that transformers reads."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    from lanternpp.models.hub import quiet

    words = ["<pad>", "</s>", "<unk>", "a", "red", "blue", "tulip", "of", "photo", "the"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    shape = T5Config(
        vocab_size=len(words), d_model=CAPTION, d_kv=8, d_ff=32, num_layers=2, num_heads=2, is_gated_act=True
    )
    with quiet():
        T5EncoderModel(shape).save_pretrained(folder)
    return folder


def write_llamagen(folder: Path, text: bool = False, layout: str = "official", grid: int = 4) -> Path:
    """A folder with a target, a tokenizer and, for texts, the encoder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = llamagen(text)
    if layout == "official":
        torch.save({"model": tensors, "steps": 7}, folder / "t2i_XL_tiny.pt")
        config = {"block_size": grid * grid}
    else:
        save_file(llama_named(tensors), folder / "model.safetensors")
        config = {"block_size": grid * grid, "model_type": "llama", "num_attention_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({"model": vq16()}, folder / "vq_ds16.pt")
    if text:
        t5(folder / "flan-t5-xl")
    return folder
