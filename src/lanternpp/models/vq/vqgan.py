"""Codes to pixels, and back, by the convolutional networks of VQGAN (arXiv 2012.09841), as several families publish it.

In MoVQ (2209.09002) every normalisation of the decoder is scaled and shifted by the latents, as they are looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.nn.checkpoints import Blocks, Codes, Stages, Width
from lanternpp.util.jsonfile import Between

M = TypeVar("M", bound=nn.Module)
GROUPS = 32  # of every normalisation of published tokenizers


@dataclass(frozen=True)
class VQGANConfig:
    """The shape of a decoder; LlamaGen's VQ-16 (arXiv 2406.06525) is the default."""

    grid: Annotated[int, Between(0, 128)] = 0  # codes of an image's side; 0: any width and height, for `draw`
    codes: Codes = 16384  # V
    dim: Width = 8  # C, of a code's latent
    channels: Width = 128
    multiples: Stages = (1, 1, 2, 2, 4)  # of channels, from the full size to the coarsest
    blocks: Blocks = 3  # residual blocks of a stage
    latent: Width = 256  # channels between the latent's 1x1 convolution and the decoder
    attention: bool = True  # after every block of the coarsest stage; in the middle there always is
    unit: bool = True  # codebook rows are normalised when they are looked up
    spatial: bool = False  # normalisations are those of MoVQ

    @property
    def down(self) -> int:
        """Pixels of an image's side per code."""
        return 1 << (len(self.multiples) - 1)


def channels_last(module: M) -> M:
    """The same module with its convolutions laid out channels last, as CPUs and tensor cores prefer."""
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


def norm(channels: int, latent: int = 0, groups: int = GROUPS) -> nn.Module:
    """Group normalisation; with the channels of a latent, MoVQ's."""
    plain = nn.GroupNorm(min(groups, channels), channels, eps=1e-6)
    return SpatialNorm(plain, latent) if latent else plain


class SpatialNorm(nn.Module):
    """Group normalisation, scaled and shifted by 1x1 convolutions of the latent of every place."""

    def __init__(self, plain: nn.GroupNorm, latent: int):
        super().__init__()
        self.norm_layer = plain
        self.conv_y, self.conv_b = (nn.Conv2d(latent, plain.num_channels, 1) for _ in range(2))

    def forward(self, x: Tensor, latents: Tensor) -> Tensor:
        """[B, channels, H, W], latents [B, C, rows, columns] -> the shape of x."""
        z = F.interpolate(latents, size=x.shape[-2:], mode="nearest")
        return self.norm_layer(x) * self.conv_y(z) + self.conv_b(z)


class Chain(nn.Sequential):
    """Modules one after the other, each with the latents too, where the decoder is MoVQ's."""

    def forward(self, x: Tensor, *latents: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H', W']."""
        for module in self:
            x = module(x, *latents)
        return x


class Residual(nn.Module):
    """Norm, swish, 3x3, twice; a 1x1 convolution beside them where the channels change."""

    def __init__(self, inputs: int, outputs: int, latent: int = 0, groups: int = GROUPS):
        super().__init__()
        self.norm1, self.norm2 = norm(inputs, latent, groups), norm(outputs, latent, groups)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.beside = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, *latents: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H, W]."""
        h = self.conv1(F.silu(self.norm1(x, *latents)))
        return self.beside(x) + self.conv2(F.silu(self.norm2(h, *latents)))


class Attention(nn.Module):
    """Residual self-attention over all places."""

    def __init__(self, channels: int, latent: int = 0, groups: int = GROUPS, heads: int = 1):
        super().__init__()
        self.heads, self.norm = heads, norm(channels, latent, groups)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, *latents: Tensor) -> Tensor:
        """[B, C, H, W] -> the same shape."""
        b, c, h, w = x.shape
        qkv = self.qkv(self.norm(x, *latents)).permute(0, 2, 3, 1).reshape(b, h * w, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, heads, HW, C / heads]
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h, w, c)
        return x + self.out(y.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last))


class Level(nn.Module):
    """Residual blocks of one size, each with attention after it where the level has it; then perhaps a change of size.

    resize: "up", twice the size by repetition and a 3x3; "down", half of it by a 3x3 of stride 2; or "".
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
        """[B, inputs, H, W] -> [B, outputs, H', W']."""
        for i, block in enumerate(self.blocks):
            x = block(x, *latents)
            if self.attention:
                x = self.attention[i](x, *latents)
        if self.up is not None:
            x = self.up(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        if self.down is not None:
            # padded on the right and below, as it was trained
            x = self.down(F.pad(x, (0, 1, 0, 1)))
        return x


class VQGAN(nn.Module):
    """A codebook and the decoder over it; the encoder is read only where pictures are to be read."""

    kind = "vqgan"  # in the config.json of a folder of ours
    codebook: Tensor  # [V, C] float32, as it is looked up
    encoder: Callable[[], nn.Module] | None = None  # reads it, where the checkpoint may have one

    def __init__(self, config: VQGANConfig):
        super().__init__()
        self.config = config
        widths = [config.channels * multiple for multiple in reversed(config.multiples)]
        first, latent = widths[0], config.dim * config.spatial
        self.register_buffer("codebook", torch.zeros(config.codes, config.dim))
        self.expand = nn.Conv2d(config.dim, config.latent, 1)
        self.entry = nn.Conv2d(config.latent, first, 3, padding=1)
        self.middle = Chain(
            Residual(first, first, latent), Attention(first, latent), Residual(first, first, latent)
        )
        deepest = len(widths) - 1
        self.stages = Chain(
            *(
                Level(inputs, width, config.blocks, config.attention and not i, "up" * (i < deepest), latent)
                for i, (inputs, width) in enumerate(zip([first, *widths], widths, strict=False))
            )
        )
        self.exit = nn.Sequential(norm(widths[-1], latent), nn.SiLU(), nn.Conv2d(widths[-1], 3, 3, padding=1))

    def prepare_for_inference(self) -> VQGAN:
        """Call after loading weights: normalises the codebook and lays convolutions out channels last."""
        if self.config.unit:
            self.codebook = F.normalize(self.codebook, dim=-1)
        return channels_last(self).eval().requires_grad_(False)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B, length] -> images [B, 3, H, W] in [-1, 1], float32."""
        if tuple(codes.shape[1:]) != (self.config.grid**2,):
            raise InputError(f"codes are {tuple(codes.shape)}; it draws from [B, {self.config.grid**2}].")
        return self.draw(codes.unflatten(1, (self.config.grid, self.config.grid)))

    @torch.no_grad()
    def draw(self, codes: Tensor) -> Tensor:
        """Codes [B, rows, columns] -> images [B, 3, H, W] in [-1, 1], float32."""
        x = self.codebook[codes].to(self.expand.weight.dtype).permute(0, 3, 1, 2)
        x = x.contiguous(memory_format=torch.channels_last)
        latents = (x,) if self.config.spatial else ()
        h = self.stages(self.middle(self.entry(self.expand(x)), *latents), *latents)
        return self.exit[1:](self.exit[0](h, *latents)).float().clamp(-1, 1)


class VQGANEncoder(nn.Module):
    """The encoder that goes with a `VQGAN` of the same config; it has a block less in every stage."""

    def __init__(self, config: VQGANConfig):
        super().__init__()
        widths = [config.channels * multiple for multiple in config.multiples]
        coarsest, blocks = widths[-1], config.blocks - 1
        self.entry = nn.Conv2d(3, config.channels, 3, padding=1)
        stages, deepest = [], len(widths) - 1
        for i, (inputs, width) in enumerate(zip([config.channels, *widths], widths, strict=False)):
            resize = "down" * (i < deepest)
            stages.append(Level(inputs, width, blocks, config.attention and i == deepest, resize))
        self.stages = nn.Sequential(*stages)
        before = coarsest if blocks else config.channels
        self.middle = nn.Sequential(Residual(before, before), Attention(before), Residual(before, before))
        self.exit = nn.Sequential(norm(before), nn.SiLU(), nn.Conv2d(before, config.latent, 3, padding=1))
        self.squeeze = nn.Conv2d(config.latent, config.dim, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [-1, 1] -> latents [B, C, H/down, W/down]."""
        return self.squeeze(self.exit(self.middle(self.stages(self.entry(images)))))
