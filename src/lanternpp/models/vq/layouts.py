"""How published checkpoints name the parts of a VQGAN, decoders and encoders read from among other tensors, and folders of ours.

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

DRAWING = r"(decoder|post_quant_conv|quantize\.embedding)\."  # not what only encodes or trains
READING = r"encoder\.|quant_conv\."
# A parameter of a layer, or of a layer within a norm of MoVQ's.
PARAMETER = r"\.((?:norm_layer\.|conv_[yb]\.)?(?:weight|bias))"
MOST_STAGES = 8


@dataclass(frozen=True)
class Names:
    """The names of the parts of a decoder and an encoder in a layout."""

    middle: tuple[str, str, str]
    up: str  # a stage of a decoder
    down: str  # of an encoder
    block: str
    coarse_first: bool  # stage 0 of a decoder is the coarsest, not the finest; of an encoder it is the finest
    unit: bool  # rows of the codebook are normalised when they are looked up

    def stages(self, count: int) -> list[str]:
        """A decoder's, the coarsest first."""
        return [f"{self.up}.{i if self.coarse_first else count - 1 - i}" for i in range(count)]


TAMING = Names(("mid.block_1", "mid.attn_1", "mid.block_2"), "up", "down", "block", False, False)
"""taming-transformers, and what is derived from it: Chameleon's tokenizer, MoVQGAN, IBQ."""
LLAMAGEN = Names(("mid.0", "mid.1", "mid.2"), "conv_blocks", "conv_blocks", "res", True, True)
MARKS = {
    "quantize.embedding.weight",
    "post_quant_conv.weight",
    "decoder.mid.1.proj_out.weight",
}  # of LlamaGen's


def shape_of(source: Source, names: Names, prefix: str = "") -> dict[str, Any]:
    """Fields of a published tokenizer's `VQGANConfig`, from its tensors. InputError."""
    there, body = source.metas, f"{prefix}decoder."
    count = min(source.layers(re.escape(f"{body}{names.up}.")), MOST_STAGES + 1)
    stages = [f"{body}{stage}" for stage in names.stages(max(count, 1))]
    widths = [source.shape(f"{stage}.{names.block}.0.conv1.weight", 4)[0] for stage in reversed(stages)]
    codes, dim = source.shape(f"{prefix}quantize.embedding.weight", 2)
    return {
        "codes": codes,
        "dim": dim,
        "channels": widths[0],
        "multiples": tuple(width // widths[0] for width in widths),
        "blocks": sum(f"{stages[0]}.{names.block}.{i}.conv1.weight" in there for i in range(9)),
        "latent": source.shape(f"{prefix}post_quant_conv.weight", 4)[0],
        "attention": f"{stages[0]}.attn.0.q.weight" in there,
        "unit": names.unit,
        "spatial": f"{body}{names.middle[0]}.norm1.conv_y.weight" in there,
    }


def rules(config: VQGANConfig, names: Names, prefix: str = "", encoder: bool = False) -> list[Rename]:
    """The names of a layout, below `prefix` (a regular expression), as a `VQGAN`'s or a `VQGANEncoder`'s."""
    body, count = prefix + (r"encoder\." if encoder else r"decoder\."), len(config.multiples)
    width = config.channels * config.multiples[-1]
    outside = ("quant_conv", "squeeze") if encoder else ("post_quant_conv", "expand")
    stages = [f"{names.down}.{i}" for i in range(count)] if encoder else names.stages(count)
    coarsest, resized = (count - 1, "down") if encoder else (0, "up")
    found = [
        Rename(prefix + outside[0] + PARAMETER, rf"{outside[1]}.\1"),
        Rename(prefix + r"quantize\.embedding\.weight", "codebook"),
    ]

    def layers(theirs: str, ours: str, **pairs: str) -> None:
        place = body + re.escape(theirs)
        found.extend(Rename(place + name + PARAMETER, rf"{ours}{mine}.\1") for name, mine in pairs.items())

    def block(theirs: str, ours: str) -> None:
        same = {name: name for name in ("norm1", "conv1", "norm2", "conv2")}
        layers(f"{theirs}.", f"{ours}.", **same, nin_shortcut="beside")

    def attention(theirs: str, ours: str) -> None:
        layers(f"{theirs}.", f"{ours}.", norm="norm", proj_out="out")
        for i, name in enumerate("qkv"):
            pattern, part = body + re.escape(f"{theirs}.{name}") + PARAMETER, (i * width, (i + 1) * width)
            found.append(Rename(pattern, rf"{ours}.qkv.\1", part=part))

    layers("", "", conv_in="entry", norm_out="exit.0", conv_out="exit.2")
    block(names.middle[0], "middle.0")
    attention(names.middle[1], "middle.1")
    block(names.middle[2], "middle.2")
    for i, theirs in enumerate(stages):
        layers(f"{theirs}.{resized}sample.", f"stages.{i}.", conv=resized)
        for j in range(config.blocks - encoder):
            block(f"{theirs}.{names.block}.{j}", f"stages.{i}.blocks.{j}")
            if i == coarsest:
                attention(f"{theirs}.attn.{j}", f"stages.{i}.attention.{j}")
    return found


def read_vqgan(
    source: Source, dtype: torch.dtype, names: Names = TAMING, prefix: str = "", **fields: Any
) -> VQGAN:
    """The decoder in a checkpoint of a layout, below `prefix`, or in a folder of ours; its codebook in float32. InputError.

    fields: of its config, which its tensors or its config.json do not say.
    """
    ours = source.config.get("kind") == VQGAN.kind
    shape = source.config if ours else shape_of(source, names, prefix)
    config = config_as(VQGANConfig, shape | fields, source.path)
    with blank(source.path):
        vq = VQGAN(config)
    below = re.escape(prefix)
    skip = [f"(?!{below}).*", f"{below}(?!{DRAWING}).*"]
    source.fill(vq, [SAME] if ours else rules(config, names, below), dtype, () if ours else skip)
    if not ours and not prefix:
        kind = dtype if names is LLAMAGEN else torch.float32
        vq.encoder = partial(read_encoder, source, config, names, kind)
    return vq.prepare_for_inference()


def read_encoder(source: Source, config: VQGANConfig, names: Names, dtype: torch.dtype) -> VQGANEncoder:
    """The encoder in a checkpoint of such a layout. InputError where there is none."""
    if not any(name.startswith("encoder.mid.") for name in source.metas):
        raise InputError(
            f"{source.path} has no encoder, so it reads no pictures: use --self instead of --data, or its original."
        )
    with blank(source.path):
        encoder = VQGANEncoder(config)
    source.fill(encoder, rules(config, names, encoder=True), dtype, [f"(?!({READING})).*"])
    return channels_last(encoder).eval().requires_grad_(False)


def find_tokenizer(folder: Path, given: Path | None = None) -> Source:
    """LlamaGen's tokenizer that is given, or the one in `folder`: its `tokenizer/`, or the file that is one.

    Raises InputError that says what to put there.
    """
    sure = given or folder / "tokenizer"
    files = (path for path in folder.iterdir() if path.suffix in (SAFE, *PICKLED))
    named_first = sorted(files, key=lambda path: ("vq" not in path.name.lower(), path.name))
    fault = None
    for path in [sure] if given or sure.is_dir() else named_first:
        try:
            source = Source.open(path)
            if source.config.get("kind") == VQGAN.kind or source.metas.keys() >= MARKS:
                return source
        except InputError as error:
            fault = fault or (error if path == sure or "vq" in path.name.lower() else None)
    if fault:
        raise fault
    if given:
        raise InputError(
            f"{given} is no image tokenizer of LlamaGen's; name vq_ds16_c2i.pt or vq_ds16_t2i.pt"
        )
    raise InputError(
        f"{folder} holds no image tokenizer; put vq_ds16_c2i.pt or vq_ds16_t2i.pt, from the authors of "
        "LlamaGen, beside the target, or use lanternpp models convert TARGET OUT --vq FILE, where both may be hub ids"
    )


def save_tokenizer(vq: VQGAN, folder: Path, store: Store) -> None:
    """Write a decoder as a tokenizer folder of ours."""
    config = asdict(vq.config) | {"unit": False}  # its codebook is normalised, and would round anew
    save(folder, {"kind": vq.kind, **config}, vq.state_dict(), store, ["codebook"])
