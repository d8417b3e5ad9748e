"""How published checkpoints name the parts of a VQGAN, and decoders and encoders read from among other tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from lanternpp.errors import InputError
from lanternpp.models.vq.encoder import VQGANEncoder
from lanternpp.models.vq.vqgan import VQGAN, VQGANConfig
from lanternpp.nn.sources import Rename, Source, blank

DRAWING = r"(decoder|post_quant_conv|quantize\.embedding)\."  # not what only encodes or trains
READING = r"encoder\.|quant_conv\."
PARAMETER = r"\.(weight|bias)"


@dataclass(frozen=True)
class Names:
    """What a layout calls the decoder's parts."""

    middle: tuple[str, str, str]
    stage: str
    block: str
    coarse_first: bool  # stage 0 of a decoder is the coarsest, not the finest; of an encoder it is the finest


TAMING = Names(("mid.block_1", "mid.attn_1", "mid.block_2"), "up", "block", False)  # taming-transformers
LLAMAGEN = Names(("mid.0", "mid.1", "mid.2"), "conv_blocks", "res", True)  # FoundationVision


def rules(config: VQGANConfig, names: Names, prefix: str = "") -> list[Rename]:
    """The names of a layout, below `prefix` (a regular expression), as a `VQGAN`'s."""
    body = prefix + r"decoder\."
    count = len(config.multiples)
    blocks = {names.middle[0]: "middle.0", names.middle[2]: "middle.2"}
    mixes = {names.middle[1]: "middle.1"}
    found = [
        Rename(prefix + r"quantize\.embedding\.weight", "codebook"),
        Rename(prefix + r"post_quant_conv" + PARAMETER, r"expand.\1"),
        Rename(body + "conv_in" + PARAMETER, r"entry.\1"),
        Rename(body + "norm_out" + PARAMETER, r"exit.0.\1"),
        Rename(body + "conv_out" + PARAMETER, r"exit.2.\1"),
    ]
    for i in range(count):
        theirs = f"{names.stage}.{i if names.coarse_first else count - 1 - i}"
        found.append(Rename(body + re.escape(f"{theirs}.upsample.conv") + PARAMETER, rf"stages.{i}.up.\1"))
        for j in range(config.blocks):
            blocks[f"{theirs}.{names.block}.{j}"] = f"stages.{i}.blocks.{j}"
            if i == 0:
                mixes[f"{theirs}.attn.{j}"] = f"stages.0.attention.{j}"
    return found + _parts(body, blocks, mixes, config.channels * config.multiples[-1])


def encoder_rules(config: VQGANConfig) -> list[Rename]:
    """LlamaGen's names as a `VQGANEncoder`'s."""
    body, names = r"encoder\.", LLAMAGEN
    blocks = {names.middle[0]: "middle.0", names.middle[2]: "middle.2"}
    mixes = {names.middle[1]: "middle.1"}
    found = [
        Rename("quant_conv" + PARAMETER, r"squeeze.\1"),
        Rename(body + "conv_in" + PARAMETER, r"entry.\1"),
        Rename(body + "norm_out" + PARAMETER, r"exit.0.\1"),
        Rename(body + "conv_out" + PARAMETER, r"exit.2.\1"),
    ]
    last = len(config.multiples) - 1
    for i in range(last + 1):
        theirs = f"{names.stage}.{i}"
        found.append(
            Rename(body + re.escape(f"{theirs}.downsample.conv") + PARAMETER, rf"stages.{i}.down.\1")
        )
        for j in range(config.blocks - 1):
            blocks[f"{theirs}.{names.block}.{j}"] = f"stages.{i}.blocks.{j}"
            if i == last:
                mixes[f"{theirs}.attn.{j}"] = f"stages.{i}.attention.{j}"
    return found + _parts(body, blocks, mixes, config.channels * config.multiples[-1])


def _parts(body: str, blocks: dict[str, str], mixes: dict[str, str], width: int) -> list[Rename]:
    """The residual blocks and the attentions, `width` channels wide, by their names and ours."""
    found = []
    for theirs, ours in blocks.items():
        place = body + re.escape(theirs)
        found.append(Rename(rf"{place}\.(norm1|conv1|norm2|conv2){PARAMETER}", rf"{ours}.\1.\2"))
        found.append(Rename(rf"{place}\.nin_shortcut{PARAMETER}", rf"{ours}.beside.\1"))
    for theirs, ours in mixes.items():
        place = body + re.escape(theirs)
        for i, name in enumerate("qkv"):
            part = (i * width, (i + 1) * width)
            found.append(Rename(rf"{place}\.{name}{PARAMETER}", rf"{ours}.qkv.\1", part=part))
        found.append(Rename(rf"{place}\.norm{PARAMETER}", rf"{ours}.norm.\1"))
        found.append(Rename(rf"{place}\.proj_out{PARAMETER}", rf"{ours}.out.\1"))
    return found


def read_vqgan(source: Source, config: VQGANConfig, prefix: str, dtype: torch.dtype) -> VQGAN:
    """The decoder in taming-transformers' layout below `prefix` (a regular expression), its codebook in float32."""
    with blank(source.path):
        vq = VQGAN(config)
    others = [f"(?!{prefix}).*"] if prefix else []
    source.fill(vq, rules(config, TAMING, prefix), dtype, [*others, f"{prefix}(?!{DRAWING}).*"])
    return vq.prepare_for_inference()


def read_encoder(
    source: Source, config: VQGANConfig, dtype: torch.dtype, device: torch.device | str
) -> VQGANEncoder:
    """The encoder in a checkpoint of LlamaGen's layout. InputError where there is none."""
    if not any(re.fullmatch(r"encoder\.mid\..*", name) for name in source.metas):
        raise InputError(
            f"{source.path} has no encoder, so it reads no pictures: use --self instead of --data, or its original."
        )
    with blank(source.path):
        encoder = VQGANEncoder(config)
    source.fill(encoder, encoder_rules(config), dtype, [f"(?!({READING})).*"], device)
    encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return encoder.eval().requires_grad_(False)
