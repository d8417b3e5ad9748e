"""Emu3's VQ decoder and encoder (arXiv 2409.18869), of transformers' parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.nn.checkpoints import save
from lanternpp.nn.configs import Codes, Heads, Share, Stages, Width
from lanternpp.nn.sources import SAME, Rename, Source, blank
from lanternpp.nn.stores import Store
from lanternpp.util.schema import Between

if TYPE_CHECKING:
    from transformers.models.emu3.modeling_emu3 import Emu3VQVAE

READING = r"encoder\.|quant_conv\."
DRAWING = r"(decoder|post_quant_conv|quantize\.embedding)\."


@dataclass(frozen=True)
class Emu3VQConfig:
    """The fields of transformers' Emu3VQVAEConfig, with its defaults."""

    codebook_size: Codes = 32768
    embed_dim: Width = 4
    latent_channels: Width = 4
    double_latent: bool = False
    in_channels: Annotated[int, Between(1, 16)] = 3
    out_channels: Annotated[int, Between(3, 3)] = 3
    temporal_downsample_factor: Annotated[int, Between(1, 16)] = 4
    base_channels: Width = 256
    channel_multiplier: Stages = (1, 2, 2, 4)
    num_res_blocks: Annotated[int, Between(0, 32)] = 2
    attn_resolutions: tuple[int, ...] = (3,)
    hidden_size: Width = 1024
    num_attention_heads: Heads = 1
    attention_dropout: Share = 0.0

    def parts(self) -> Emu3VQVAE:
        """transformers' network of this shape."""
        from transformers import Emu3VQVAEConfig
        from transformers.models.emu3.modeling_emu3 import Emu3VQVAE

        return Emu3VQVAE(Emu3VQVAEConfig(**asdict(self)))


class Emu3Decoder(nn.Module):
    """Codes -> pixels, for any width and height.

    The decoder is one of video and makes several frames of a code; an image is the first of them, and only
    that one is drawn here.
    """

    codebook: Tensor  # [V, C]
    encoder: Callable[[], nn.Module] | None = None  # reads it, where the checkpoint has one

    def __init__(self, config: Emu3VQConfig):
        super().__init__()
        parts = config.parts()
        self.decoder, self.after = parts.decoder, parts.post_quant_conv
        self.register_buffer("codebook", torch.empty(config.codebook_size, config.embed_dim))

    @property
    def down(self) -> int:
        """Pixels of an image's side per code."""
        return 1 << len(self.decoder.up_block.up) - 1

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B, rows, columns] -> images [B, 3, H, W] in [-1, 1], float32."""
        parts = self.decoder
        latents = self.codebook[codes].permute(0, 3, 1, 2)[:, :, None].to(parts.conv_in.weight.dtype)
        both = torch.cat((self.after(latents), latents))  # [2B, C, frames, rows, columns]
        for layer in parts.time_res_stack:
            both = layer(both)
        for layer in parts.time_conv:
            both = F.silu(layer(both))
        x, guide = both[:, :, 0].chunk(2)
        x = parts.middle_block(parts.conv_in(x), guide)
        x = parts.norm_out(parts.up_block(x, guide), guide)
        return parts.conv_out(F.silu(x)).float().clamp(-1, 1)


class Emu3Encoder(nn.Module):
    """Pixels -> latents; an image is as many equal frames of a video as make one of the code's."""

    def __init__(self, config: Emu3VQConfig):
        super().__init__()
        parts = config.parts()
        self.encoder, self.before = parts.encoder, parts.quant_conv
        self.frames = config.temporal_downsample_factor

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [-1, 1] -> latents [B, C, rows, columns]."""
        video = images[:, None].repeat(1, self.frames, 1, 1, 1)
        return self.before(self.encoder(video).transpose(1, 2))[:, :, 0]


def read_encoder(
    source: Source, prefix: str, config: Emu3VQConfig, dtype: torch.dtype, device: torch.device | str
) -> Emu3Encoder:
    """The encoder below `prefix` (a regular expression) in a checkpoint."""
    with blank(source.path):
        encoder = Emu3Encoder(config)
    rules = [
        Rename(prefix + r"quant_conv\.(.*)", r"before.\1"),
        Rename(prefix + r"encoder\.(.*)", r"encoder.\1"),
    ]
    source.fill(encoder, rules, dtype, [f"(?!{prefix}({READING})).*"], device)
    encoder.encoder.to(dtype)  # its moving averages too
    return encoder.eval().requires_grad_(False)


def read_emu3(
    source: Source,
    prefix: str | None,
    config: Emu3VQConfig,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Emu3Decoder:
    """The decoder below `prefix` (a regular expression) in a checkpoint, its codebook in float32.

    prefix None: a tokenizer folder that `save_emu3` wrote.
    """
    with blank(source.path):
        vq = Emu3Decoder(config)
    if prefix is None:
        source.fill(vq, [SAME], dtype, device=device)
    else:
        rules = [
            Rename(prefix + r"quantize\.embedding\.weight", "codebook"),
            Rename(prefix + r"post_quant_conv\.(.*)", r"after.\1"),
            Rename(prefix + r"decoder\.(.*)", r"decoder.\1"),
        ]
        source.fill(vq, rules, dtype, [f"(?!{prefix}).*", f"{prefix}(?!{DRAWING}).*"], device)
        vq.encoder = partial(read_encoder, source, prefix, config, dtype, device)
    vq.decoder.to(dtype)  # its moving averages too
    return vq.eval().requires_grad_(False)


def save_emu3(vq: Emu3Decoder, folder: Path, store: Store) -> None:
    """Write a decoder as a tokenizer folder of ours."""
    save(folder, {"kind": "emu3-vq"}, vq.state_dict(), store, ["codebook"])
