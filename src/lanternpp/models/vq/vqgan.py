"""The convolutional decoder and encoder of VQGAN (arXiv 2012.09841), as several families publish them.

In MoVQ (2209.09002) the looked-up latents scale and shift every normalisation of the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.nn.checkpoints import Blocks, Codes, Stages, Width

M = TypeVar("M", bound=nn.Module)
GROUPS = 32  # in every normalisation of published tokenizers


@dataclass(frozen=True)
class VQGANConfig:
    """The shape of a decoder, by default of LlamaGen's VQ-16 (arXiv 2406.06525)."""

    codes: Codes = 16384  # V
    dim: Width = 8  # C, of a code's latent
    channels: Width = 128
    multiples: Stages = (1, 1, 2, 2, 4)  # of `channels` by stage, from the full size to the coarsest
    blocks: Blocks = 3  # residual blocks of a stage
    latent: Width = 256  # channels between the latent's 1x1 convolution and the decoder
    attention: bool = True  # after every block of the coarsest stage, besides the one in the middle
    unit: bool = True  # codebook rows are normalised before they are looked up
    spatial: bool = False  # normalisations are those of MoVQ

    @property
    def down(self) -> int:
        """Pixels of an image's side per code."""
        return 1 << (len(self.multiples) - 1)


def channels_last(module: M) -> M:
    """Lay a module's convolutions out channels last, which is faster on CPUs and tensor cores, and return the module."""
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


def norm(channels: int, latent: int = 0, groups: int = GROUPS) -> nn.Module:
    """Return a group normalisation; with the channels of a latent, that of MoVQ."""
    plain = nn.GroupNorm(min(groups, channels), channels, eps=1e-6)
    return SpatialNorm(plain, latent) if latent else plain


class SpatialNorm(nn.Module):
    """Group normalisation, scaled and shifted by 1x1 convolutions of the latents."""

    def __init__(self, plain: nn.GroupNorm, latent: int):
        super().__init__()
        self.norm_layer = plain
        self.conv_y = nn.Conv2d(latent, plain.num_channels, 1)
        self.conv_b = nn.Conv2d(latent, plain.num_channels, 1)

    def forward(self, x: Tensor, latents: Tensor) -> Tensor:
        """Normalise x [B, channels, H, W] by latents [B, C, rows, columns]."""
        z = F.interpolate(latents, size=x.shape[-2:], mode="nearest")
        return self.norm_layer(x) * self.conv_y(z) + self.conv_b(z)


class Chain(nn.Sequential):
    """A sequence of modules that each also get the latents, if the decoder is MoVQ's."""

    def forward(self, x: Tensor, *latents: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H', W']."""
        for module in self:
            x = module(x, *latents)
        return x


class Residual(nn.Module):
    """Norm, swish and 3x3 convolution, twice, and the input; a 1x1 convolution of the input if the channels change."""

    def __init__(self, inputs: int, outputs: int, latent: int = 0, groups: int = GROUPS):
        super().__init__()
        self.norm1, self.norm2 = norm(inputs, latent, groups), norm(outputs, latent, groups)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.beside = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, *latents: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H, W]."""
        h = self.conv1(F.silu(self.norm1(x, *latents)))
        return self.beside(x) + self.conv2(F.silu(self.norm2(h, *latents)))


class Attention(nn.Module):
    """Residual self-attention over all positions."""

    def __init__(self, channels: int, latent: int = 0, groups: int = GROUPS, heads: int = 1):
        super().__init__()
        self.heads, self.norm = heads, norm(channels, latent, groups)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, *latents: Tensor) -> Tensor:
        """Map [B, C, H, W] to the same shape."""
        b, c, h, w = x.shape
        qkv = self.qkv(self.norm(x, *latents)).permute(0, 2, 3, 1).reshape(b, h * w, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, heads, HW, C / heads]
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h, w, c)
        return x + self.out(y.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last))


class Level(nn.Module):
    """Residual blocks at one size, each followed by attention if `attention` is true; then a change of size.

    resize: "up", twice the size by repetition and a 3x3; "down", half the size by a 3x3 of stride 2; or "", no change.
    """

    def __init__(self, inputs: int, outputs: int, blocks: int, attention: bool, resize: str, latent: int = 0):
        super().__init__()
        self.blocks = nn.ModuleList(
            Residual(outputs if i else inputs, outputs, latent) for i in range(blocks)
        )
        self.attention = nn.ModuleList(Attention(outputs, latent) for _ in range(blocks if attention else 0))
        self.up = nn.Conv2d(outputs, outputs, 3, padding=1) if resize == "up" else None
        self.down = nn.Conv2d(outputs, outputs, 3, stride=2) if resize == "down" else None

    def forward(self, x: Tensor, *latents: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H', W']."""
        for i, block in enumerate(self.blocks):
            x = block(x, *latents)
            if self.attention:
                x = self.attention[i](x, *latents)
        if self.up is not None:
            x = self.up(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        if self.down is not None:
            # Published models were trained with padding on the right and below alone.
            x = self.down(F.pad(x, (0, 1, 0, 1)))
        return x


class VQGAN(nn.Module):
    """A codebook and its decoder."""

    kind = "vqgan"  # the `kind` in the config.json of a folder of ours
    codebook: Tensor  # [V, C] float32

    def __init__(self, config: VQGANConfig):
        super().__init__()
        self.config = config
        widths = [config.channels * multiple for multiple in reversed(config.multiples)]
        width = widths[0]
        latent = config.dim if config.spatial else 0
        self.register_buffer("codebook", torch.zeros(config.codes, config.dim, dtype=torch.float32))
        self.expand = nn.Conv2d(config.dim, config.latent, 1)
        self.entry = nn.Conv2d(config.latent, width, 3, padding=1)
        self.middle = Chain(
            Residual(width, width, latent), Attention(width, latent), Residual(width, width, latent)
        )
        self.stages = Chain()
        for i, outputs in enumerate(widths):
            attention = config.attention and i == 0  # in the coarsest stage
            resize = "up" if i < len(widths) - 1 else ""
            self.stages.append(Level(width, outputs, config.blocks, attention, resize, latent))
            width = outputs
        self.exit = nn.Sequential(norm(widths[-1], latent), nn.SiLU(), nn.Conv2d(widths[-1], 3, 3, padding=1))

    def prepare_for_inference(self) -> VQGAN:
        """Normalise the codebook and lay convolutions out channels last; to be called after loading weights."""
        if self.config.unit:
            self.codebook = F.normalize(self.codebook, dim=-1)
        return channels_last(self).eval().requires_grad_(False)

    def encoder(self) -> nn.Module:
        """Read the encoder, where the checkpoint that the decoder was read from has one; InputError where it has none."""
        raise InputError(
            "this model's tokenizer is without its encoder, so it reads no pictures: use the model as it was published, "
            "or for a training --self instead of --data."
        )

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes [B, rows, columns] to images [B, 3, H, W] in [-1, 1], float32."""
        x = self.codebook[codes].to(self.expand.weight.dtype).permute(0, 3, 1, 2)
        x = x.contiguous(memory_format=torch.channels_last)
        latents = (x,) if self.config.spatial else ()
        h = self.stages(self.middle(self.entry(self.expand(x)), *latents), *latents)
        h = self.exit[0](h, *latents)  # of the last layers only the norm reads latents
        return self.exit[1:](h).float().clamp(-1, 1)


class VQGANEncoder(nn.Module):
    """The encoder of a `VQGAN` with the same config, with one block less in every stage."""

    def __init__(self, config: VQGANConfig):
        super().__init__()
        self.config = config
        widths = [config.channels * multiple for multiple in config.multiples]
        width, blocks = config.channels, config.blocks - 1
        self.entry = nn.Conv2d(3, width, 3, padding=1)
        self.stages = nn.Sequential()
        for i, outputs in enumerate(widths):
            coarsest = i == len(widths) - 1
            resize = "" if coarsest else "down"
            self.stages.append(Level(width, outputs, blocks, config.attention and coarsest, resize))
            width = outputs if blocks else width  # a stage without blocks does not change the width
        self.middle = nn.Sequential(Residual(width, width), Attention(width), Residual(width, width))
        self.exit = nn.Sequential(norm(width), nn.SiLU(), nn.Conv2d(width, config.latent, 3, padding=1))
        self.squeeze = nn.Conv2d(config.latent, config.dim, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Encode images [B, 3, H, W] in [-1, 1] as latents [B, C, H/down, W/down]."""
        return self.squeeze(self.exit(self.middle(self.stages(self.entry(images)))))
