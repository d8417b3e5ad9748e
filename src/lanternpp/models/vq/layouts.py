"""The names of the parts of a VQGAN in published checkpoints; VQGANs read from these and from folders of ours.

LlamaGen's tokenizer (arXiv 2406.06525, section 2.1) is read from the files that its authors publish.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lanternpp.errors import InputError
from lanternpp.models.vq.vqgan import VQGAN, VQGANConfig, VQGANEncoder, channels_last
from lanternpp.nn.checkpoints import Store, config_as, save
from lanternpp.nn.files import PICKLED, SAFE
from lanternpp.nn.sources import SAME, Rename, Source, blank

DECODER_TENSORS = r"(decoder|post_quant_conv|quantize\.embedding)\."
ENCODER_TENSORS = r"encoder\.|quant_conv\."
MAX_STAGES = 8
# Our names of parts, and those of all layouts.
OUTSIDE = {"expand": "post_quant_conv", "squeeze": "quant_conv"}
PARTS = {
    "entry": "conv_in",
    "exit.0": "norm_out",
    "exit.2": "conv_out",
    "up": "upsample.conv",
    "down": "downsample.conv",
    "attention": "attn",
    "out": "proj_out",
    "beside": "nin_shortcut",
}
WORD = re.compile(r"(?:middle|stages|exit)\.\d|\w+")  # a part in one of our names


@dataclass(frozen=True)
class Names:
    """The names of the parts of a decoder and an encoder in a layout, where layouts differ."""

    middle: tuple[str, ...]
    up: str  # a stage of a decoder
    down: str  # a stage of an encoder
    block: str
    coarse_first: bool  # stage 0 of a decoder is the coarsest, not the finest as that of an encoder
    unit: bool  # rows of the codebook are normalised when they are looked up

    def stages(self, count: int) -> list[str]:
        """Return the names of a decoder's stages, the coarsest first."""
        return [f"{self.up}.{i if self.coarse_first else count - 1 - i}" for i in range(count)]


TAMING = Names(("mid.block_1", "mid.attn_1", "mid.block_2"), "up", "down", "block", False, False)
"""The names of taming-transformers and its descendants: Chameleon's tokenizer, MoVQGAN, IBQ."""
LLAMAGEN = Names(("mid.0", "mid.1", "mid.2"), "conv_blocks", "conv_blocks", "res", True, True)
LLAMAGEN_TENSORS = {"quantize.embedding.weight", "post_quant_conv.weight", "decoder.mid.1.proj_out.weight"}


def layers(module: VQGAN | VQGANEncoder, names: Names) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield the convolutions and norms of a decoder or an encoder: our name, the layout's name, and the layer."""
    is_encoder, count = isinstance(module, VQGANEncoder), len(module.config.multiples)
    stages = [f"{names.down}.{i}" for i in range(count)] if is_encoder else names.stages(count)
    parts = PARTS | {"blocks": names.block}
    parts |= {f"stages.{i}": stage for i, stage in enumerate(stages)}
    parts |= {f"middle.{i}": part for i, part in enumerate(names.middle)}
    for ours, layer in module.named_modules():
        if isinstance(layer, nn.Conv2d | nn.GroupNorm):
            theirs = ".".join(parts.get(word, word) for word in WORD.findall(ours))
            yield ours, OUTSIDE.get(ours, f"{'encoder' if is_encoder else 'decoder'}.{theirs}"), layer


def rename_rules(module: VQGAN | VQGANEncoder, names: Names, prefix: str = "") -> list[Rename]:
    """Return the renames of a layout, below `prefix` (a regular expression), to a `VQGAN` or a `VQGANEncoder`."""
    rules = [Rename(rf"{prefix}quantize\.embedding\.weight", "codebook")]
    for ours, theirs, layer in layers(module, names):
        pattern = rf"{prefix}{re.escape(theirs)}\.(weight|bias)"
        if not theirs.endswith(".qkv"):
            rules.append(Rename(pattern, rf"{ours}.\1"))
            continue
        rows = layer.get_parameter("bias").numel() // 3
        for i, name in enumerate("qkv"):
            part = (i * rows, (i + 1) * rows)
            rules.append(Rename(pattern.replace("qkv", name), rf"{ours}.\1", part=part))
    return rules


def shape_of(source: Source, names: Names, prefix: str = "") -> dict[str, Any]:
    """Return the fields of a published tokenizer's `VQGANConfig`, from its tensors. Raise InputError."""
    body = f"{prefix}decoder."
    count = min(source.layers(re.escape(f"{body}{names.up}.")), MAX_STAGES + 1)
    stages = [f"{body}{stage}" for stage in names.stages(max(count, 1))]
    widths = [source.shape(f"{stage}.{names.block}.0.conv1.weight", 4)[0] for stage in reversed(stages)]
    codes, dim = source.shape(f"{prefix}quantize.embedding.weight", 2)
    return {
        "codes": codes,
        "dim": dim,
        "channels": widths[0],
        "multiples": tuple(width // widths[0] for width in widths),
        "blocks": sum(f"{stages[0]}.{names.block}.{i}.conv1.weight" in source.metas for i in range(9)),
        "latent": source.shape(f"{prefix}post_quant_conv.weight", 4)[0],
        "attention": f"{stages[0]}.attn.0.q.weight" in source.metas,
        "unit": names.unit,
        "spatial": f"{body}{names.middle[0]}.norm1.conv_y.weight" in source.metas,
    }


def read_vqgan(source: Source, dtype: torch.dtype, names: Names = TAMING, prefix: str = "") -> VQGAN:
    """Read the decoder in a checkpoint, below `prefix`, or in a folder of ours; its codebook in float32. Raise InputError."""
    is_ours = source.config.get("kind") == VQGAN.kind
    shape = source.config if is_ours else shape_of(source, names, prefix)
    with blank(source.path):
        vq = VQGAN(config_as(VQGANConfig, shape, source.path))
    pattern = re.escape(prefix)
    if is_ours:
        source.fill(vq, [SAME], dtype)
    else:
        skipped = [f"(?!{pattern}).*", f"{pattern}(?!{DECODER_TENSORS}).*"]
        source.fill(vq, rename_rules(vq, names, pattern), dtype, skipped)
        if not prefix and any(name.startswith("encoder.mid.") for name in source.metas):
            encoder_dtype = dtype if names is LLAMAGEN else torch.float32
            vars(vq)["encoder"] = partial(read_encoder, source, vq.config, names, encoder_dtype)
    return vq.prepare_for_inference()


def read_encoder(source: Source, config: VQGANConfig, names: Names, dtype: torch.dtype) -> VQGANEncoder:
    """Read the encoder in a published checkpoint. Raise InputError."""
    with blank(source.path):
        encoder = VQGANEncoder(config)
    source.fill(encoder, rename_rules(encoder, names), dtype, [f"(?!({ENCODER_TENSORS})).*"])
    return channels_last(encoder).eval().requires_grad_(False)


def find_tokenizer(folder: Path, tokenizer: Path | None = None) -> Source:
    """Open LlamaGen's tokenizer: the path `tokenizer`, else `tokenizer/` in the folder, else a file in it with vq in its name."""
    if tokenizer is None and (folder / "tokenizer").is_dir():
        tokenizer = folder / "tokenizer"
    files = (path for path in folder.iterdir() if path.suffix in (SAFE, *PICKLED))
    path = tokenizer or min((path for path in files if "vq" in path.name.lower()), default=None)
    if path is None:
        raise InputError(
            f"{folder} holds no image tokenizer; put vq_ds16_c2i.pt or vq_ds16_t2i.pt, from the authors of "
            "LlamaGen, beside the target, or use lanternpp models convert TARGET OUT --vq FILE, where both may be hub ids"
        )
    source = Source.open(path)
    if source.config.get("kind") != VQGAN.kind and not source.metas.keys() >= LLAMAGEN_TENSORS:
        raise InputError(f"{path} is no image tokenizer of LlamaGen's; name vq_ds16_c2i.pt or vq_ds16_t2i.pt")
    return source


def save_tokenizer(vq: VQGAN, folder: Path, store: Store) -> None:
    """Write a decoder as a tokenizer folder of ours."""
    # The codebook is already normalised, and a second normalisation would round it again.
    config = asdict(vq.config) | {"unit": False}
    save(folder, {"kind": vq.kind, **config}, vq.state_dict(), store, ["codebook"])
