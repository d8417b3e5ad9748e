"""Tiny random checkpoints in the layouts of published models, written by transformers' own classes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from helpers.checkpoints import made
from lanternpp.models.transformers.janus import BEGIN, DRAW, PAD
from lanternpp.models.vq.vqgan import VQGANConfig

WORDS = [
    "a",
    "photo",
    "of",
    "the",
    "red",
    "tulip",
    "sea",
    "at",
    "sunset",
    "Generate",
    "an",
    "image",
    "of",
    "according",
    "to",
    "following",
    "prompt:",
    "lowres",
]
CODES = 64


def image_token(code: int) -> str:
    """Chameleon's name of a code's token: its decimal digits as the letters A to J."""
    return f"IMGIMG{''.join(chr(ord('A') + int(digit)) for digit in str(code))}Z"


def visual_token(code: int) -> str:
    """Emu3's name of a code's token."""
    return f"<|visual token {code:06d}|>"


def lively(module: torch.nn.Module, seed: int = 0) -> None:
    """Weights strong enough for the context to matter; norms and biases that are not one and zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name or weight.dim() == 1:
            weight.data = noise * 0.2 + (1.0 if name.endswith("weight") else 0.0)
        else:
            weight.data = noise * (1.5 / weight[0].numel() ** 0.5)


def write_tokenizer(folder: Path, tokens: list[str]) -> dict[str, int]:
    """tokenizer.json of special tokens and some words; ids in the order given."""
    vocab = {token: i for i, token in enumerate([*tokens, *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=tokens[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([t for t in tokens if t.startswith("<")])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return vocab


def taming(config: VQGANConfig) -> dict[str, torch.Tensor]:
    """A VQ decoder of taming-transformers' layout, by its names and shapes."""
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, inputs: int, outputs: int, side: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs, side, side), (outputs,)

    def norm(name: str, channels: int) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (channels,)

    def block(name: str, inputs: int, outputs: int) -> None:
        norm(f"{name}.norm1", inputs)
        conv(f"{name}.conv1", inputs, outputs, 3)
        norm(f"{name}.norm2", outputs)
        conv(f"{name}.conv2", outputs, outputs, 3)
        if inputs != outputs:
            conv(f"{name}.nin_shortcut", inputs, outputs, 1)

    def mix(name: str, channels: int) -> None:
        norm(f"{name}.norm", channels)
        for part in ("q", "k", "v", "proj_out"):
            conv(f"{name}.{part}", channels, channels, 1)

    widths = [config.channels * m for m in config.multiples]
    shapes["quantize.embedding.weight"] = (config.codes, config.dim)
    conv("post_quant_conv", config.dim, config.latent, 1)
    conv("decoder.conv_in", config.latent, widths[-1], 3)
    block("decoder.mid.block_1", widths[-1], widths[-1])
    mix("decoder.mid.attn_1", widths[-1])
    block("decoder.mid.block_2", widths[-1], widths[-1])
    width = widths[-1]
    for stage in reversed(range(len(widths))):
        up = f"decoder.up.{stage}"
        for i in range(config.blocks):
            block(f"{up}.block.{i}", width, widths[stage])
            width = widths[stage]
            if config.attention and stage == len(widths) - 1:
                mix(f"{up}.attn.{i}", width)
        if stage:
            conv(f"{up}.upsample.conv", width, width, 3)
    norm("decoder.norm_out", width)
    conv("decoder.conv_out", width, 3, 3)
    tensors = made(shapes)
    tensors["decoder.conv_out.weight"] /= 8  # pixels that clamping leaves alone
    return tensors


CHAMELEON_VQ = VQGANConfig(
    codes=CODES,
    dim=4,
    latent=8,
    channels=32,
    multiples=(1, 1, 1, 1, 1),
    blocks=1,
    attention=False,
    unit=False,
)


def chameleon_tokens() -> list[str]:
    """Chameleon's special tokens and image codes, in its order."""
    sizes = [f"<reserved{8800 + n:05d}>" for n in range(1, 9)]
    return [
        *("<s>", "<pad>", "</s>", "<unk>"),
        *(image_token(i) for i in range(CODES)),
        *("<eoss>", "<racm3:break>", "<reserved08706>", "<reserved08799>"),
        *sizes,
    ]


def write_chameleon(folder: Path, lumina: bool = False, decoder: bool = True, **changes: Any) -> Any:
    """A tiny Chameleon; the transformers model that wrote it. Lumina's has norms that all heads share."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    vocab = write_tokenizer(folder, chameleon_tokens())
    vq = CHAMELEON_VQ
    fields = {
        "vocab_size": len(vocab) + 5,
        **LANGUAGE,
        "vocabulary_map": vocab | {"<image>": len(vocab)},
        "vq_config": {
            "embed_dim": vq.dim,
            "num_embeddings": vq.codes,
            "latent_channels": vq.latent,
            "base_channels": vq.channels,
            "channel_multiplier": list(vq.multiples),
            "num_res_blocks": vq.blocks - 1,
            "resolution": 64,
        },
    }
    torch.manual_seed(0)
    model = ChameleonForConditionalGeneration(ChameleonConfig(**fields | changes)).eval()
    lively(model)
    if lumina:  # one row of norms, as its authors store it
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                for parameter in norm.parameters():
                    parameter.data = parameter.data[:1].expand_as(parameter).clone()
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if lumina:
        tensors = {k: v[:1] if "q_norm" in k or "k_norm" in k else v for k, v in tensors.items()}
    names = taming(vq)
    if decoder and not lumina:
        tensors |= {f"model.vqmodel.{name}": tensor for name, tensor in names.items()}
    elif decoder:
        save_file(names, folder / "vqgan.safetensors")
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata={"format": "pt"})
    return model


LANGUAGE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def rewrite(folder: Path, names: dict[str, str]) -> None:
    """Rename the tensors of a checkpoint: regular expressions, applied one after the other."""
    path = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        for pattern, new in names.items():
            name = re.sub(pattern, new, name)
        tensors[name] = tensor.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def write_janus(folder: Path, authors: bool = False, **language: int) -> Any:
    """A tiny Janus of 4 x 4 codes; the transformers model that wrote it. authors: in their own layout; language: its sizes."""
    from transformers import JanusConfig, JanusForConditionalGeneration

    vocab = write_tokenizer(folder, [BEGIN, PAD, DRAW, "<|User|>:", "<|Assistant|>:"])
    config = JanusConfig(
        text_config=LANGUAGE
        | {"model_type": "llama", "vocab_size": len(vocab) + 3, "rms_norm_eps": 1e-6}
        | language,
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 64,
            "num_image_tokens": 16,
            "projection_dim": language.get("hidden_size", 32),
        },
        vq_config={
            "embed_dim": 4,
            "num_embeddings": CODES,
            "latent_channels": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 1, 2],
            "num_res_blocks": 1,
            "projection_dim": language.get("hidden_size", 32),
            "image_token_embed_dim": 32,
        },
    )
    torch.manual_seed(0)
    model = JanusForConditionalGeneration(config).eval()
    lively(model)
    model.save_pretrained(folder)
    if authors:
        rewrite(folder, JANUS_AUTHORS)
        written = json.loads((folder / "config.json").read_text())
        written["model_type"] = "multi_modality"
        written["architectures"] = ["MultiModalityCausalLM"]
        written["language_config"] = written.pop("text_config")
        del written["language_config"]["rms_norm_eps"]
        (folder / "config.json").write_text(json.dumps(written))
    return model


JANUS_AUTHORS = {
    r"^lm_head": "language_model.lm_head",
    r"^model\.language_model": "language_model.model",
    r"^model\.vision_model": "vision_model",
    r"^model\.aligner": "aligner",
    r"^model\.generation_embeddings": "gen_embed",
    r"^model\.generation_aligner\.fc1": "gen_aligner.layers.0",
    r"^model\.generation_aligner\.hidden_layers\.0": "gen_aligner.layers.2",
    r"^model\.generation_head\.proj_out": "gen_head.output_mlp_projector",
    r"^model\.generation_head": "gen_head",
    r"^model\.vqmodel": "gen_vision_model",
    r"mid\.block_1": "mid.0",
    r"mid\.attn_1": "mid.1",
    r"mid\.block_2": "mid.2",
    r"(gen_vision_model\.\w+)\.(up|down)\.(\d+)\.block": r"\1.conv_blocks.\3.res",
    r"(gen_vision_model\.\w+)\.(up|down)\.(\d+)": r"\1.conv_blocks.\3",
}


def write_emu3(folder: Path, hub: bool = False, size: str = "32x32") -> Any:
    """A tiny Emu3 of 8 px a code and a size that its config.json tells; the transformers model that wrote it. hub: under the names of the hub's files."""
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    special = ["<|endoftext|>", "<|extra_200|>", "<|extra_201|>", "<|extra_203|>", "<|extra_204|>"]
    special += ["<|image token|>", "<|image start|>", "<|image end|>", "<image>"]
    vocab = write_tokenizer(folder, [*special, *map(visual_token, range(CODES)), "4*4", "2*3"])
    config = Emu3Config(
        text_config=LANGUAGE | {"vocab_size": len(vocab) + 3, "pad_token_id": 0, "attention_dropout": 0.0},
        vq_config={
            "codebook_size": CODES,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 2],
            "num_res_blocks": 1,
            "hidden_size": 64,
        },
        vocabulary_map=vocab,
    )
    torch.manual_seed(0)
    model = Emu3ForConditionalGeneration(config).eval()
    lively(model)
    for name, moving in model.named_buffers():
        if name.endswith("running_mean"):
            moving.normal_(0, 0.1)
        elif name.endswith("running_var"):
            moving.uniform_(0.5, 2)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"size": size}))
    if hub:
        names = {r"^lm_head": "text_model.lm_head", r"^model\.text_model": "text_model.model"}
        rewrite(folder, names | {r"^model\.vqmodel": "vqmodel"})
    return model


def write_glm_processor(folder: Path) -> Any:
    """The processor of a tiny GLM-Image: codes are the first tokens, as in the published one."""
    from transformers import GlmImageProcessor, PreTrainedTokenizerFast
    from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

    codes = [f"<|dit_token_{n}|>" for n in range(CODES + 4)]
    write_tokenizer(folder, [*codes, "<image>", "<sop>", "<eop>", "1", "2"])
    special = {"image_token": "<image>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=codes[CODES],
        pad_token=codes[-1],
        padding_side="left",
        extra_special_tokens=special,
    )
    template = "{% for m in messages %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endfor %}"
    processor = GlmImageProcessor(GlmImageImageProcessorPil(), tokenizer, chat_template=template)
    processor.save_pretrained(folder)
    return processor


def write_glm_image(folder: Path, positions: int = LANGUAGE["max_position_embeddings"]) -> Any:
    """A tiny GLM-Image of 64 codes and 4 tokens besides, of which 65 ends a picture; the transformers model that wrote it."""
    from transformers import GlmImageConfig, GlmImageForConditionalGeneration

    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1],
    }
    config = GlmImageConfig(
        text_config=LANGUAGE
        | {
            "max_position_embeddings": positions,
            "vocab_size": 100,
            "vision_vocab_size": CODES + 4,
            "hidden_size": 32,
            "rope_parameters": rope,
        }
        | {"pad_token_id": 90, "eos_token_id": CODES + 1},
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 16,
            "image_size": 32,
        },
        vq_config={"embed_dim": 8, "num_embeddings": CODES, "latent_channels": 16},
        image_token_id=91,
        image_start_token_id=CODES,
        image_end_token_id=CODES + 1,
    )
    torch.manual_seed(0)
    model = GlmImageForConditionalGeneration(config).eval()
    lively(model)
    model.save_pretrained(folder)
    return model
