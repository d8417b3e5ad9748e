"""The names of the parts of a VQGAN in published checkpoints; VQGANs read from these and from folders of ours.

LlamaGen's tokenizer (arXiv 2406.06525, section 2.1) is read from the files that its authors publish.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lanternpp.errors import InputError
from lanternpp.models.vq.vqgan import VQGAN, VQGANConfig, VQGANEncoder, channels_last
from lanternpp.nn.checkpoints import Store, config_as, save
from lanternpp.nn.files import PICKLED, SAFE
from lanternpp.nn.sources import SAME, Rename, Source, blank

DECODER_TENSORS = r"(decoder|post_quant_conv|quantize\.embedding)\."
ENCODER_TENSORS = r"encoder\.|quant_conv\."
# A parameter of a layer, or of a layer within a norm of MoVQ's.
PARAMETER = r"\.((?:norm_layer\.|conv_[yb]\.)?(?:weight|bias))"
MAX_STAGES = 8


@dataclass(frozen=True)
class Names:
    """The names of the parts of a decoder and an encoder in a layout."""

    middle: tuple[str, str, str]
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


def rename_rules(config: VQGANConfig, names: Names, prefix: str = "", encoder: bool = False) -> list[Rename]:
    """Return the renames of a layout, below `prefix` (a regular expression), to a `VQGAN` or a `VQGANEncoder`."""
    num_stages, width = len(config.multiples), config.channels * config.multiples[-1]
    if encoder:
        body, resize, coarsest = prefix + r"encoder\.", "down", num_stages - 1
        stages = [f"{names.down}.{i}" for i in range(num_stages)]
        renames = [Rename(rf"{prefix}quant_conv{PARAMETER}", r"squeeze.\1")]
    else:
        body, resize, coarsest = prefix + r"decoder\.", "up", 0
        stages = names.stages(num_stages)
        renames = [Rename(rf"{prefix}post_quant_conv{PARAMETER}", r"expand.\1")]
    renames.append(Rename(prefix + r"quantize\.embedding\.weight", "codebook"))

    def layers(theirs: str, ours: str, **pairs: str) -> None:
        for their_name, our_name in pairs.items():
            pattern = body + re.escape(theirs) + their_name + PARAMETER
            renames.append(Rename(pattern, rf"{ours}{our_name}.\1"))

    def block(theirs: str, ours: str) -> None:
        layers(f"{theirs}.", f"{ours}.", norm1="norm1", conv1="conv1", norm2="norm2", conv2="conv2")
        layers(f"{theirs}.", f"{ours}.", nin_shortcut="beside")

    def attention(theirs: str, ours: str) -> None:
        layers(f"{theirs}.", f"{ours}.", norm="norm", proj_out="out")
        for i, name in enumerate("qkv"):
            pattern = body + re.escape(f"{theirs}.{name}") + PARAMETER
            renames.append(Rename(pattern, rf"{ours}.qkv.\1", part=(i * width, (i + 1) * width)))

    layers("", "", conv_in="entry", norm_out="exit.0", conv_out="exit.2")
    block(names.middle[0], "middle.0")
    attention(names.middle[1], "middle.1")
    block(names.middle[2], "middle.2")
    for i, theirs in enumerate(stages):
        layers(f"{theirs}.{resize}sample.", f"stages.{i}.", conv=resize)
        for j in range(config.blocks - encoder):
            block(f"{theirs}.{names.block}.{j}", f"stages.{i}.blocks.{j}")
            if i == coarsest:
                attention(f"{theirs}.attn.{j}", f"stages.{i}.attention.{j}")
    return renames


def read_vqgan(
    source: Source, dtype: torch.dtype, names: Names = TAMING, prefix: str = "", **fields: Any
) -> VQGAN:
    """Read the decoder in a checkpoint, below `prefix`, or in a folder of ours; its codebook in float32. Raise InputError.

    fields: fields of the config that the tensors and the config.json do not determine.
    """
    ours = source.config.get("kind") == VQGAN.kind
    shape = source.config if ours else shape_of(source, names, prefix)
    config = config_as(VQGANConfig, shape | fields, source.path)
    with blank(source.path):
        vq = VQGAN(config)
    if ours:
        source.fill(vq, [SAME], dtype)
        return vq.prepare_for_inference()
    pattern = re.escape(prefix)
    skipped = [f"(?!{pattern}).*", f"{pattern}(?!{DECODER_TENSORS}).*"]
    source.fill(vq, rename_rules(config, names, pattern), dtype, skipped)
    if not prefix:
        encoder_dtype = dtype if names is LLAMAGEN else torch.float32
        vq.encoder = partial(read_encoder, source, config, names, encoder_dtype)
    return vq.prepare_for_inference()


def read_encoder(source: Source, config: VQGANConfig, names: Names, dtype: torch.dtype) -> VQGANEncoder:
    """Read the encoder in a published checkpoint. Raise InputError if there is none."""
    if not any(name.startswith("encoder.mid.") for name in source.metas):
        raise InputError(
            f"{source.path} has no encoder, so it reads no pictures: use --self instead of --data, or its original."
        )
    with blank(source.path):
        encoder = VQGANEncoder(config)
    source.fill(encoder, rename_rules(config, names, encoder=True), dtype, [f"(?!({ENCODER_TENSORS})).*"])
    return channels_last(encoder).eval().requires_grad_(False)


def find_tokenizer(folder: Path, tokenizer: Path | None = None) -> Source:
    """Open LlamaGen's tokenizer: the path `tokenizer`, else `tokenizer/` in the folder, else a tokenizer's file in the folder.

    Raise InputError if no path can be read: the first fault of a path that can only be a tokenizer, if any.
    """
    default = tokenizer or folder / "tokenizer"
    files = (path for path in folder.iterdir() if path.suffix in (SAFE, *PICKLED))
    vq_first = sorted(files, key=lambda path: ("vq" not in path.name.lower(), path.name))
    fault: InputError | None = None
    for path in [default] if tokenizer or default.is_dir() else vq_first:
        try:
            source = Source.open(path)
            if source.config.get("kind") == VQGAN.kind or source.metas.keys() >= LLAMAGEN_TENSORS:
                return source
        except InputError as error:
            # Files of other names may hold anything.
            if path == default or "vq" in path.name.lower():
                fault = fault or error
    if fault:
        raise fault
    if tokenizer:
        raise InputError(
            f"{tokenizer} is no image tokenizer of LlamaGen's; name vq_ds16_c2i.pt or vq_ds16_t2i.pt"
        )
    raise InputError(
        f"{folder} holds no image tokenizer; put vq_ds16_c2i.pt or vq_ds16_t2i.pt, from the authors of "
        "LlamaGen, beside the target, or use lanternpp models convert TARGET OUT --vq FILE, where both may be hub ids"
    )


def save_tokenizer(vq: VQGAN, folder: Path, store: Store) -> None:
    """Write a decoder as a tokenizer folder of ours."""
    # The codebook is already normalised, and a second normalisation would round it again.
    config = asdict(vq.config) | {"unit": False}
    save(folder, {"kind": vq.kind, **config}, vq.state_dict(), store, ["codebook"])
