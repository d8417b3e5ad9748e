"""Tiny random checkpoints in the layouts of published models, written by transformers' own classes."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from helpers.checkpoints import tensors_of, vqgan_shapes
from lanternpp.api.model import read_target
from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
from lanternpp.models.transformers.emu35 import SPECIAL as EMU35_SPECIAL
from lanternpp.models.transformers.janus import BEGIN, DRAW, PAD
from lanternpp.models.vq.cosmos import COSMOS, Cosmos
from lanternpp.models.vq.layouts import layers
from lanternpp.models.vq.vqgan import VQGANConfig
from lanternpp.nn import checkpoints
from lanternpp.nn.decoder import DecoderConfig, line_table
from lanternpp.nn.sources import blank

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


def model_of(name: str, **fields: Any) -> Any:
    """A model by the name of its class in transformers, of a config with these fields.

    Weights are strong enough for the context to matter; norms and biases are not one and zero.
    """
    import transformers

    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**fields)).eval()
    generator = torch.Generator().manual_seed(0)
    norm = 0.0 if name.startswith("Gemma") else 1.0  # Gemma's norms add one
    for part, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in part or weight.dim() == 1:
            weight.data = noise * 0.2 + (norm if part.endswith("weight") else 0.0)
        else:
            weight.data = noise * (1.5 / weight[0].numel() ** 0.5)
    return model


def update_config(folder: Path, *removed: str, **changes: Any) -> None:
    """Change fields of a folder's config.json."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if name not in removed}
    (folder / "config.json").write_text(json.dumps(config))


def write_tokenizer(folder: Path, tokens: list[str]) -> dict[str, int]:
    """tokenizer.json of special tokens and some words; ids in the order given."""
    vocab = {token: i for i, token in enumerate([*tokens, *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=tokens[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([t for t in tokens if t.startswith("<")])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return vocab


def taming(config: VQGANConfig, encoder: bool = False) -> dict[str, torch.Tensor]:
    """A VQ decoder of taming-transformers' layout; encoder: and the encoder."""
    tensors = tensors_of(vqgan_shapes(config, encoder))
    tensors["decoder.conv_out.weight"] /= 8  # pixels within the clamped range
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


def write_chameleon(
    folder: Path,
    lumina: bool = False,
    decoder: bool = True,
    tokens: list[str] | None = None,
    **changes: Any,
) -> Any:
    """A tiny Chameleon; the transformers model that wrote it. Lumina's has norms that groups of heads share."""
    vocab = write_tokenizer(folder, tokens or chameleon_tokens())
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
    model = model_of("ChameleonForConditionalGeneration", **fields | changes)
    if lumina:  # norms of two groups of heads, as its authors store them
        (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                for parameter in norm.parameters():
                    parameter.data = parameter.data[:2].repeat_interleave(len(parameter) // 2, 0)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if lumina:
        tensors = {k: v[:: len(v) // 2] if "q_norm" in k or "k_norm" in k else v for k, v in tensors.items()}
    names = taming(vq)
    if decoder and not lumina:
        tensors |= {f"model.vqmodel.{name}": tensor for name, tensor in names.items()}
    elif decoder:
        save_file(names, folder / "vqgan.safetensors")
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata={"format": "pt"})
    return model


EMU35_VQ = replace(CHAMELEON_VQ, latent=4, blocks=2, attention=True)
LUMINA2_VQ = replace(EMU35_VQ, multiples=(1, 1, 1, 1), spatial=True)


def write_lumina2(folder: Path) -> Any:
    """A tiny Lumina-mGPT 2.0 of 32 px, its tokenizer beside it; the transformers model that wrote it."""
    special = ["<|endoftext|>", "<|im_end|>", "<racm3:break>", "<eoss>", "<reserved08706>", "<reserved08799>"]
    sizes = [f"<reserved{8800 + n:05d}>" for n in range(1, 9)]
    codes = [f"<MOVQGAN{code:05d}>" for code in range(CODES)]
    model = write_chameleon(folder, lumina=True, decoder=False, tokens=[*special, *codes, *sizes])
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "vqmodel" not in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(taming(LUMINA2_VQ, encoder=True), folder / "movqgan_270M.ckpt")
    text = {"bos_token": None, "eos_token": {"content": special[0]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(text))
    update_config(folder, size="32x32")
    return model


def write_emu35(folder: Path, tokenizer: bool = True) -> Any:
    """A tiny Emu3.5 of 64 px in its authors' layout; the transformers model that is the same. Its words are bytes and a few pairs."""
    tokens = [*(bytes([n]) for n in range(256)), b"re", b" the", b" t"]
    lines = [f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    ids = {name: len(tokens) + place for place, name in enumerate(EMU35_SPECIAL)}
    named = {
        f"{short}_token_id": ids[name]
        for short, name in (("eol", "<|extra_200|>"), ("img", "<|image token|>"), ("boi", "<|image start|>"))
    }
    named["eoi_token_id"] = max(ids.values())
    sizes = LANGUAGE | {
        "num_attention_heads": 8,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(tokens) + len(ids) + CODES,
    }
    model = model_of("Qwen3ForCausalLM", **sizes | named, rope_parameters=ROPE, pad_token_id=0)
    model.save_pretrained(folder)
    theirs = {"model_type": "Emu3", "architectures": ["Emu3ForCausalLM"], "rope_theta": ROPE["rope_theta"]}
    theirs |= {"attention_dropout": 0.1, "rope_scaling": None, "size": "64x64"}
    update_config(folder, "rope_parameters", "layer_types", **theirs)
    (folder / "emu3.tiktoken").write_text("".join(lines))
    if tokenizer:
        write_ibq(folder / "Emu3.5-VisionTokenizer")
    return model


def write_ibq(folder: Path) -> None:
    """The tokenizer of a tiny Emu3.5."""
    folder.mkdir(parents=True)
    save_file(taming(EMU35_VQ, encoder=True), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "Emu3p5VisionVQ", "codebook_size": CODES}))


LANGUAGE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
ROPE = {"rope_type": "default", "rope_theta": 1e6}


def rename_tensors(folder: Path, names: dict[str, str]) -> None:
    """Rename the tensors of a checkpoint: regular expressions, applied one after the other."""
    path = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        for pattern, new in names.items():
            name = re.sub(pattern, new, name)
        tensors[name] = tensor.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def write_janus(folder: Path, **language: int) -> Any:
    """A tiny Janus of 4 x 4 codes; the transformers model that wrote it. language: its sizes."""
    vocab = write_tokenizer(folder, [BEGIN, PAD, DRAW, "<|User|>:", "<|Assistant|>:"])
    model = model_of(
        "JanusForConditionalGeneration",
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
            "image_token_embed_dim": language.get("hidden_size", 32),
        },
    )
    model.save_pretrained(folder)
    return model


def write_emu3(folder: Path, hub: bool = False, size: str = "32x32") -> Any:
    """A tiny Emu3 of 8 px a code and a size that its config.json tells; the transformers model that wrote it. hub: under the names of the hub's files."""
    special = ["<|endoftext|>", "<|extra_200|>", "<|extra_201|>", "<|extra_203|>", "<|extra_204|>"]
    special += ["<|image token|>", "<|image start|>", "<|image end|>", "<image>"]
    codes = [f"<|visual token {code:06d}|>" for code in range(CODES)]
    vocab = write_tokenizer(folder, [*special, *codes, "4*4", "2*3"])
    model = model_of(
        "Emu3ForConditionalGeneration",
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
    for name, moving in model.named_buffers():
        if name.endswith("running_mean"):
            moving.normal_(0, 0.1)
        elif name.endswith("running_var"):
            moving.uniform_(0.5, 2)
    model.save_pretrained(folder)
    update_config(folder, size=size)
    if hub:
        names = {r"^lm_head": "text_model.lm_head", r"^model\.text_model": "text_model.model"}
        rename_tensors(folder, names | {r"^model\.vqmodel": "vqmodel"})
    return model


def cosmos(book: tuple[int, int], latent: int = 8, width: int = 16) -> dict[str, torch.Tensor]:
    """NVIDIA's decoder of videos, by the names and shapes in its `decoder.jit`: three stages of two blocks."""
    fields = {"channels": width, "multiples": (1, 2, 2), "blocks": 2, "attention": False, "unit": False}
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, inputs: int, outputs: int, *kernel: int) -> None:
        shapes[f"{name}.conv3d.weight"] = (outputs, inputs, *kernel)
        shapes[f"{name}.conv3d.bias"] = (outputs,)

    with blank():
        ours = Cosmos(VQGANConfig(codes=book[0], dim=book[1], latent=latent, **fields))
    for _, name, layer in layers(ours, COSMOS):
        size = len(layer.bias)
        if isinstance(layer, torch.nn.GroupNorm):
            shapes[f"{name}.norm.weight"] = shapes[f"{name}.norm.bias"] = (size,)
        elif name.endswith("upsample.conv"):
            for part, kernel in (("1", (3, 1, 1)), ("2", (1, 3, 3)), ("3", (1, 1, 1))):
                conv(f"{name}{part}", size, size, *kernel)
        elif name.endswith(("qkv", "attn_1.1.proj_out")):
            for part in ("q", "k", "v", "proj_out"):
                conv(f"{name.rpartition('.')[0]}.{part}", layer.in_channels, layer.in_channels, 1, 1, 1)
        elif layer.kernel_size == (3, 3):
            size = 192 if name.endswith("conv_out") else size  # of four frames, of which we draw one
            conv(f"{name}.0", layer.in_channels, size, 1, 3, 3)
            conv(f"{name}.1", size, size, 3, 1, 1)
        elif not name.endswith("block.2"):  # which is ours: the addition of frames
            conv(name, layer.in_channels, size, 1, 1, 1)
    tensors = tensors_of(shapes)
    for parameter in ("weight", "bias"):  # pixels within the clamped range
        tensors[f"decoder.conv_out.1.conv3d.{parameter}"] /= 20
    return tensors


def write_language(folder: Path, kind: str, tokens: list[str], levels: list[int], **fields: Any) -> Any:
    """A tiny language model of 64 codes, 4 x 4 of a picture, after the words; the transformers model that wrote it."""
    vocab = write_tokenizer(folder, tokens)
    fields |= LANGUAGE | {"vocab_size": len(vocab) + CODES, "levels": levels, "size": "64"}
    model = model_of(f"{kind}ForCausalLM", **fields, tie_word_embeddings=True)
    if kind == "Gemma":  # otherwise codes repeat: Gemma scales embeddings, which are the head's too
        model.get_input_embeddings().weight.data /= 4
    model.save_pretrained(folder)
    return model


def write_liquid(folder: Path, head_dim: int = 16) -> Any:
    """A tiny Liquid, its heads wider than their share of 8, as Gemma's are; the transformers model that wrote it."""
    tokens = ["<pad>", "<eos>", "<bos>", "<boi>", "<eoi>", "<unconditional>"]
    model = write_language(folder, "Gemma", tokens, [CODES], head_dim=head_dim, eos_token_id=1)
    update_config(folder, hidden_act="gelu")  # as published
    save_file(taming(CHAMELEON_VQ), folder / "vqgan.safetensors")
    return model


def write_sketch(folder: Path) -> None:
    """The model of `docs/extending.md`: a Llama over 20 words, whose config has no fields about codes."""
    write_language(folder, "Llama", ["<s>", "<draw>", "<pad>"], [CODES])
    update_config(folder, "levels", "size")
    save_file(taming(CHAMELEON_VQ), folder / "vqgan.safetensors")


def write_simplear(folder: Path, decoder: bool = True) -> Any:
    """A tiny SimpleAR with a config.json as its authors' code writes it; the transformers model that wrote it."""
    tokens = ["<|endoftext|>", "<|im_end|>", "<|t2i|>", "<|soi|>", "<|vtokens|>"]
    model = write_language(folder, "Qwen2", tokens, [4, 4, 4], rope_parameters=ROPE)
    theirs = {"architectures": ["SimpARForCausalLM"], "rope_theta": ROPE["rope_theta"]}
    update_config(folder, "rope_parameters", "layer_types", **theirs, sliding_window=32768)
    if decoder:
        save_file(cosmos((CODES, 3)), folder / "vq_cosmos.safetensors")
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
    shown = f"{codes[CODES]}<image>{codes[CODES + 1]}"
    template = f"{{% for c in messages[0]['content'] %}}{{{{ c['text'] or '{shown}' }}}}{{% endfor %}}"
    images = GlmImageImageProcessorPil(patch_size=16, merge_size=1, temporal_patch_size=1)
    processor = GlmImageProcessor(images, tokenizer, chat_template=template)
    processor.save_pretrained(folder)
    return processor


def write_glm_image(folder: Path, positions: int = LANGUAGE["max_position_embeddings"]) -> Any:
    """A tiny GLM-Image of 64 codes and 4 tokens besides, of which 65 ends a picture; the transformers model that wrote it."""
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1],
    }
    model = model_of(
        "GlmImageForConditionalGeneration",
        text_config=LANGUAGE
        | {
            "max_position_embeddings": positions,
            "vocab_size": 100,
            "vision_vocab_size": CODES + 4,
            "rope_parameters": rope,
            "pad_token_id": 90,
            "eos_token_id": CODES + 1,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 16,
            "image_size": 32,
        },
        vq_config={"embed_dim": 8, "num_embeddings": CODES, "latent_channels": 16},
        image_token_id=CODES + 4,
        image_start_token_id=CODES,
        image_end_token_id=CODES + 1,
    )
    model.save_pretrained(folder)
    return model


PUBLISHED: dict[str, Callable[[Path], Any]] = {
    "anole": write_chameleon,
    "janus": write_janus,
    "emu3": write_emu3,
    "lumina2": write_lumina2,
    "emu3.5": write_emu35,
    "liquid": write_liquid,
    "simplear": write_simplear,
}
"""What writes a tiny checkpoint of each family that has a config.json and pixels."""
EVERY = PUBLISHED | {"Lumina-mGPT-7B-64": partial(write_chameleon, lumina=True)}
"""And of Lumina-mGPT, which the name of its folder distinguishes from Anole. A picture has 4 x 4 codes."""
PIXELS = dict.fromkeys(EVERY, 16) | {"emu3": 8, "lumina2": 8}  # of a code's side


def write_eagle(folder: Path, dim: int = LANGUAGE["hidden_size"]) -> Path:
    """A folder with a random EAGLE drafter of that width for models whose positions lie on a line."""
    shape = EagleConfig.like(DecoderConfig(dim, 1, LANGUAGE["num_attention_heads"], 48))
    torch.manual_seed(1)
    drafter = EagleDrafter(shape, line_table(8, shape.decoder.head_dim))
    checkpoints.save(folder, {"kind": "eagle", **shape.flat()}, drafter.state_dict())
    return folder


def with_drafters(folder: Path, name: str = "", aux_layers: tuple[int, ...] = ()) -> Path:
    """The folder of a model, with random drafters for it written into it, or into a folder of that name in it, which is returned."""
    torch.manual_seed(1)
    decoder = read_target(folder, torch.float32).decoder
    shape = EagleConfig.like(decoder.config)
    drafter = EagleDrafter(shape, decoder.rotary_table)
    checkpoints.save(folder / name / "drafter", {"kind": "eagle", **shape.flat()}, drafter.state_dict())
    many = ParallelConfig.like(decoder.config, queries=3, turn=16, aux_layers=aux_layers)
    tensors = ParallelDrafter(many, decoder.rotary_table).state_dict()
    checkpoints.save(folder / name / "parallel", {"kind": "parallel", **many.flat()}, tensors)
    return folder / name
