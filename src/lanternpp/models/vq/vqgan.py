"""Codes to pixels by the convolutional decoder of VQGAN (arXiv 2012.09841), as several families publish it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.nn.configs import Blocks, Codes, Stages, Width
from lanternpp.util.schema import Between

GROUPS = 32  # of every normalisation


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

    @property
    def down(self) -> int:
        """Pixels of an image's side per code."""
        return 1 << (len(self.multiples) - 1)


def norm(channels: int) -> nn.GroupNorm:
    """Group normalisation."""
    return nn.GroupNorm(min(GROUPS, channels), channels, eps=1e-6)


class Residual(nn.Module):
    """Norm, swish, 3x3, twice; a 1x1 convolution beside them where the channels change."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.norm1, self.norm2 = norm(inputs), norm(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.beside = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H, W]."""
        h = self.conv1(F.silu(self.norm1(x)))
        return self.beside(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    """Residual self-attention over all places, in one head."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = norm(channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same shape."""
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, -1)  # [B, HW, C]
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


class Level(nn.Module):
    """Residual blocks of one size, each with attention after it where the level has it."""

    def __init__(self, inputs: int, outputs: int, blocks: int, attention: bool):
        super().__init__()
        self.blocks = nn.ModuleList(Residual(outputs if i else inputs, outputs) for i in range(blocks))
        self.attention = nn.ModuleList(Attention(outputs) for _ in range(blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H, W]."""
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.attention:
                x = self.attention[i](x)
        return x


class UpLevel(Level):
    """A level, then, but in the last stage, twice the size by repetition and a 3x3."""

    def __init__(self, inputs: int, outputs: int, blocks: int, attention: bool, last: bool):
        super().__init__(inputs, outputs, blocks, attention)
        self.up = nn.Identity() if last else nn.Conv2d(outputs, outputs, 3, padding=1)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, 2H, 2W], or H and W in the last stage."""
        x = super().forward(x)
        return x if self.last else self.up(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class VQGAN(nn.Module):
    """A codebook and the decoder over it; the encoder is read only where pictures are to be read."""

    codebook: Tensor  # [V, C] float32, as it is looked up
    encoder: Callable[[], nn.Module] | None = None  # reads it, where the checkpoint may have one

    def __init__(self, config: VQGANConfig):
        super().__init__()
        self.config = config
        widths = [config.channels * multiple for multiple in reversed(config.multiples)]
        first = widths[0]
        self.register_buffer("codebook", torch.zeros(config.codes, config.dim))
        self.expand = nn.Conv2d(config.dim, config.latent, 1)
        self.entry = nn.Conv2d(config.latent, first, 3, padding=1)
        self.middle = nn.Sequential(Residual(first, first), Attention(first), Residual(first, first))
        self.stages = nn.Sequential(
            *(
                UpLevel(inputs, width, config.blocks, config.attention and i == 0, i == len(widths) - 1)
                for i, (inputs, width) in enumerate(zip([first, *widths], widths, strict=False))
            )
        )
        self.exit = nn.Sequential(norm(widths[-1]), nn.SiLU(), nn.Conv2d(widths[-1], 3, 3, padding=1))

    @property
    def down(self) -> int:
        """Pixels of an image's side per code."""
        return self.config.down

    @property
    def length(self) -> int:
        """Codes of an image."""
        return self.config.grid**2

    def prepare_for_inference(self) -> VQGAN:
        """Call after loading weights: normalises the codebook and lays convolutions out channels last."""
        if self.config.unit:
            self.codebook = F.normalize(self.codebook, dim=-1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return self.eval().requires_grad_(False)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B, length] -> images [B, 3, H, W] in [-1, 1], float32."""
        if codes.ndim != 2 or codes.shape[1] != self.length:
            raise InputError(f"codes are {tuple(codes.shape)}; it draws from [B, {self.length}].")
        return self.draw(codes.unflatten(1, (self.config.grid, self.config.grid)))

    @torch.no_grad()
    def draw(self, codes: Tensor) -> Tensor:
        """Codes [B, rows, columns] -> images [B, 3, H, W] in [-1, 1], float32."""
        x = self.codebook[codes].to(self.expand.weight.dtype).permute(0, 3, 1, 2)
        x = x.contiguous(memory_format=torch.channels_last)
        return self.exit(self.stages(self.middle(self.entry(self.expand(x))))).float().clamp(-1, 1)
