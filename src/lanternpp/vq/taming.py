"""The convolutional VQ decoder of VQGAN (arXiv 2012.09841): LlamaGen's, Janus' and Chameleon's, by their rows.

Only what turns codes into pixels; how a checkpoint names it is a table of rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.nn.sources import Rename, Source


@dataclass(frozen=True)
class TamingConfig:
    """Shape of the decoder. Stages run from fine to coarse, each half as wide and high as the last."""

    codes: int = 16384  # V
    dim: int = 8  # C, of a codebook row
    latent: int = 256  # channels after the codebook
    base: int = 128
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)  # of `base`, a stage
    blocks: int = 2  # residual blocks of a stage of the encoder; the decoder has one more
    attending: tuple[int, ...] = ()  # stages with self-attention behind every block
    unit: bool = False  # codebook rows are l2-normalised

    def __post_init__(self) -> None:
        for name in ("multipliers", "attending"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON gives lists

    @property
    def down(self) -> int:
        """Pixels of an image's side per code."""
        return 1 << len(self.multipliers) - 1


def norm(channels: int) -> nn.GroupNorm:
    """Group normalisation in 32 groups."""
    return nn.GroupNorm(32, channels, eps=1e-6)


class Block(nn.Module):
    """Residual: norm, SiLU, 3x3, norm, SiLU, 3x3; a 1x1 where the width changes."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.norm1, self.conv1 = norm(inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = norm(outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.across: nn.Module = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H, W]."""
        h = self.conv1(F.silu(self.norm1(x)))
        return self.across(x) + self.conv2(F.silu(self.norm2(h)))


class Mix(nn.Module):
    """Residual self-attention of one head over all places."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = norm(channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same shape."""
        qkv = self.qkv(self.norm(x)).flatten(2).transpose(1, 2)[:, None]  # [B, 1, HW, 3C]
        y = F.scaled_dot_product_attention(*qkv.chunk(3, -1))
        return x + self.out(y[:, 0].transpose(1, 2).unflatten(2, x.shape[2:]))


class Stage(nn.Module):
    """Blocks of one size, then twice the size but for the finest."""

    def __init__(self, inputs: int, outputs: int, blocks: int, attends: bool, last: bool):
        super().__init__()
        self.blocks = nn.ModuleList(Block(outputs if i else inputs, outputs) for i in range(blocks))
        self.mixes = nn.ModuleList(Mix(outputs) for _ in range(blocks if attends else 0))
        self.up = None if last else nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, 2H, 2W], or [B, outputs, H, W] for the finest."""
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.mixes:
                x = self.mixes[i](x)
        return x if self.up is None else self.up(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class TamingDecoder(nn.Module):
    """Codes -> pixels, for any width and height."""

    codebook: Tensor  # [V, C], as it is looked up

    def __init__(self, config: TamingConfig):
        super().__init__()
        self.config = config
        self.register_buffer("codebook", torch.empty(config.codes, config.dim))
        widths = [config.base * m for m in config.multipliers][::-1]  # coarse to fine
        self.after = nn.Conv2d(config.dim, config.latent, 1)
        self.conv_in = nn.Conv2d(config.latent, widths[0], 3, padding=1)
        self.middle = nn.Sequential(Block(widths[0], widths[0]), Mix(widths[0]), Block(widths[0], widths[0]))
        attends = [len(widths) - 1 - i in config.attending for i in range(len(widths))]
        self.stages = nn.Sequential(
            *(
                Stage(widths[max(i - 1, 0)], width, config.blocks + 1, attends[i], i == len(widths) - 1)
                for i, width in enumerate(widths)
            )
        )
        self.norm_out = norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 3, 3, padding=1)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B, rows, columns] -> images [B, 3, H, W] in [-1, 1], float32."""
        latents = self.codebook[codes].to(self.conv_in.weight.dtype)
        x = self.conv_in(self.after(latents.permute(0, 3, 1, 2)))
        x = self.stages(self.middle(x))
        return self.conv_out(F.silu(self.norm_out(x))).float().clamp(-1, 1)


@dataclass(frozen=True)
class Names:
    """What a layout calls the decoder's parts."""

    middle: tuple[str, str, str]
    stage: str
    block: str
    coarse_first: bool  # stage 0 is the coarsest, not the finest


TAMING = Names(("mid.block_1", "mid.attn_1", "mid.block_2"), "up", "block", False)  # taming-transformers
TRANSFORMERS = Names(TAMING.middle, "up", "block", True)  # JanusVQVAE
LLAMAGEN = Names(("mid.0", "mid.1", "mid.2"), "conv_blocks", "res", True)  # FoundationVision/LlamaGen


def rules(prefix: str, config: TamingConfig, names: Names) -> list[Rename]:
    """The names of a layout, below `prefix` (a regular expression), as ours."""
    body = prefix + r"decoder\."
    widths = [config.base * m for m in config.multipliers][::-1]  # coarse to fine
    blocks = {names.middle[0]: "middle.0", names.middle[2]: "middle.2"}
    mixes = {names.middle[1]: ("middle.1", widths[0])}
    found = [
        Rename(prefix + r"quantize\.embedding\.weight", "codebook"),
        Rename(prefix + r"post_quant_conv\.(weight|bias)", r"after.\1"),
        Rename(body + r"(conv_in|norm_out|conv_out)\.(weight|bias)", r"\1.\2"),
    ]
    for i, width in enumerate(widths):
        theirs = f"{names.stage}.{i if names.coarse_first else len(widths) - 1 - i}"
        up = re.escape(f"{theirs}.upsample.conv")
        found.append(Rename(rf"{body}{up}\.(weight|bias)", rf"stages.{i}.up.\1"))
        for j in range(config.blocks + 1):
            blocks[f"{theirs}.{names.block}.{j}"] = f"stages.{i}.blocks.{j}"
            mixes[f"{theirs}.attn.{j}"] = (f"stages.{i}.mixes.{j}", width)
    for theirs, ours in blocks.items():
        place = body + re.escape(theirs)
        found.append(Rename(rf"{place}\.(norm1|conv1|norm2|conv2)\.(weight|bias)", rf"{ours}.\1.\2"))
        found.append(Rename(rf"{place}\.nin_shortcut\.(weight|bias)", rf"{ours}.across.\1"))
    for theirs, (ours, width) in mixes.items():
        place = body + re.escape(theirs)
        for i, name in enumerate("qkv"):
            part = (i * width, (i + 1) * width)
            found.append(Rename(rf"{place}\.{name}\.(weight|bias)", rf"{ours}.qkv.\1", part=part))
        found.append(Rename(rf"{place}\.norm\.(weight|bias)", rf"{ours}.norm.\1"))
        found.append(Rename(rf"{place}\.proj_out\.(weight|bias)", rf"{ours}.out.\1"))
    return found


def read_taming(
    source: Source,
    prefix: str,
    config: TamingConfig,
    names: Names,
    dtype: torch.dtype,
    device: torch.device | str,
) -> TamingDecoder:
    """The decoder below `prefix` (a regular expression) in a checkpoint, its codebook in float32."""
    with torch.device("meta"):
        vq = TamingDecoder(config)
    others = [f"(?!{prefix}).*"] if prefix else []
    drawing = r"(decoder|post_quant_conv|quantize\.embedding)\."
    source.fill(vq, rules(prefix, config, names), dtype, [*others, f"{prefix}(?!{drawing}).*"], device)
    if config.unit:
        vq.codebook = F.normalize(vq.codebook, dim=-1)
    return vq.eval().requires_grad_(False)
