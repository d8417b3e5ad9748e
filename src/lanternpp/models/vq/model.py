"""Our tokenizer: a convolutional VQ autoencoder (VQGAN, arXiv 2012.09841)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.vq.quantiser import Quantiser
from lanternpp.models.vq.reading import Reader
from lanternpp.nn.checkpoints import checksum
from lanternpp.nn.configs import Codes, StageBlocks, Stages, Width
from lanternpp.util.schema import Between

M = TypeVar("M", bound=nn.Module)
MOVING = ("quantiser.sums", "quantiser.counts")  # statistics of training, which a model folder does not hold


class Stacks:
    """The shape of encoder and decoder. Stages run from fine to coarse, each half as wide and high as the last."""

    size: int
    dim: int
    channels: tuple[int, ...]
    encoder_blocks: tuple[int, ...]
    decoder_blocks: tuple[int, ...]
    thin: int

    def __post_init__(self) -> None:
        if len({len(self.channels), len(self.encoder_blocks), len(self.decoder_blocks)}) != 1:
            raise InputError("channels, encoder_blocks and decoder_blocks need one entry per stage each.")
        if self.size % self.down:
            raise InputError(f"size {self.size} is not a multiple of {self.down}, the tokenizer's reduction.")

    @property
    def down(self) -> int:
        """Pixels of an image's side per code."""
        return 1 << len(self.channels)

    @property
    def grid(self) -> int:
        """Codes of an image's side."""
        return self.size // self.down


Pixels = Annotated[int, Between(1, 1 << 12)]


@dataclass(frozen=True)
class VQConfig(Stacks):
    """Shape of the tokenizer."""

    size: Pixels = 128  # of an image's side
    codes: Codes = 4096  # V
    dim: Width = 8  # C, of a latent
    channels: Stages = (32, 128, 256)  # at 1/2, 1/4, 1/8 of the size
    encoder_blocks: StageBlocks = (1, 1, 2)
    decoder_blocks: StageBlocks = (1, 2, 3)
    thin: Width = 16  # channels of the decoder's last stage, at full size
    commitment: Annotated[float, Between(0, 1000)] = 0.25


def norm(channels: int) -> nn.Module:
    """Group normalisation, 16 channels a group."""
    return nn.GroupNorm(max(channels // 16, 1), channels, eps=1e-6)


class Block(nn.Module):
    """Residual: norm, SiLU, 3x3, norm, SiLU, 3x3; the second convolution starts at zero."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm1, self.norm2 = norm(channels), norm(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same shape."""
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h)))


class SelfAttention(nn.Module):
    """Residual self-attention over all places, for the coarsest stage."""

    def __init__(self, channels: int, head_dim: int = 64):
        super().__init__()
        self.heads = max(channels // head_dim, 1)
        self.norm = norm(channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same shape."""
        b, c, h, w = x.shape
        qkv = self.qkv(self.norm(x)).permute(0, 2, 3, 1).reshape(b, h * w, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h, w, c)
        return x + self.out(y.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last))


class Up(nn.Module):
    """Twice the size by repetition, then 3x3."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, 2H, 2W]."""
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


def encoder(config: Stacks, outputs: int) -> nn.Sequential:
    """Images [B, 3, H, W] -> [B, outputs, H/down, W/down], latents that are not yet normalised, or their law."""
    first, last = config.channels[0], config.channels[-1]
    layers: list[nn.Module] = [nn.PixelUnshuffle(2), nn.Conv2d(12, first, 3, padding=1)]
    inputs = first
    for stage, (channels, blocks) in enumerate(zip(config.channels, config.encoder_blocks, strict=True)):
        if stage:
            layers.append(nn.Conv2d(inputs, channels, 3, stride=2, padding=1))
        layers += [Block(channels) for _ in range(blocks)]
        inputs = channels
    return nn.Sequential(*layers, SelfAttention(last), norm(last), nn.SiLU(), nn.Conv2d(last, outputs, 1))


def decoder(config: Stacks) -> nn.Sequential:
    """Latents [B, C, H/down, W/down] -> images [B, 3, H, W], not clamped."""
    last = config.channels[-1]
    layers: list[nn.Module] = [nn.Conv2d(config.dim, last, 3, padding=1), SelfAttention(last)]
    stages = list(zip(config.channels, config.decoder_blocks, strict=True))[::-1]
    for (channels, blocks), (below, _) in zip(stages, [*stages[1:], (config.thin, 1)], strict=True):
        layers += [Block(channels) for _ in range(blocks)]
        layers.append(Up(channels, below))
    return nn.Sequential(
        *layers, Block(config.thin), norm(config.thin), nn.SiLU(), nn.Conv2d(config.thin, 3, 3, padding=1)
    )


class Autoencoder(nn.Module):
    """An encoder and a decoder, which a tokenizer makes, with what lies between them."""

    config: Stacks
    encoder: nn.Sequential
    decoder: nn.Sequential

    @property
    def length(self) -> int:
        """Places of an image, each with a code or a latent."""
        return self.config.grid**2

    def encoded(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] -> the encoder's output at every place, [B, length, outputs]."""
        images = images.contiguous(memory_format=torch.channels_last)
        output: Tensor = self.encoder(images).flatten(2).transpose(1, 2)
        return output

    def render(self, latents: Tensor) -> Tensor:
        """Latents [B, length, C] -> images [B, 3, H, W], not clamped."""
        grid = self.config.grid
        x = latents.transpose(1, 2).unflatten(2, (grid, grid))
        return self.decoder(x.contiguous(memory_format=torch.channels_last)).float()

    def encode(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [-1, 1] -> codes, or moments of latents."""
        raise NotImplementedError

    def decoder_input(self, found: Tensor) -> Tensor:
        """What `encode` found [B, length, ...] as latents [B, length, C] that the decoder reads."""
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        """What a model folder holds."""
        return self.state_dict()

    @torch.no_grad()
    def redraw(self, found: Tensor) -> Tensor:
        """What `encode` found in images -> images [B, 3, H, W] in [-1, 1], float32."""
        return self.render(self.decoder_input(found).to(self.dtype)).clamp(-1, 1)

    def read(self, images: Tensor) -> Tensor:
        """As `encoded`; InputError where images are not [B, 3, size, size]."""
        size = self.config.size
        if images.ndim != 4 or tuple(images.shape[1:]) != (3, size, size):
            raise InputError(f"images are {tuple(images.shape)}; it reads [B, 3, {size}, {size}].")
        return self.encoded(images.to(self.dtype))

    def key(self) -> tuple[str, ...]:
        """Hashes of the encoder's weights, after its convolutions are laid out channels last for use."""
        channels_last(self)
        plain = [
            tensor.clone(memory_format=torch.contiguous_format)
            for tensor in self.encoder.state_dict().values()
        ]
        return tuple(checksum(tensor.view(torch.uint8)) for tensor in plain)

    @property
    def dtype(self) -> torch.dtype:
        """What the convolutions compute in."""
        return next(self.decoder.parameters()).dtype


class VQ(Autoencoder):
    """Images in [-1, 1] <-> codes in raster order."""

    config: VQConfig

    def __init__(self, config: VQConfig):
        super().__init__()
        self.config = config
        self.encoder = encoder(config, config.dim)
        self.quantiser = Quantiser(config.codes, config.dim)
        self.decoder = decoder(config)

    @property
    def codebook(self) -> Tensor:
        """[V, C], unit rows."""
        return self.quantiser.codebook

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images [B, 3, H, W] -> (reconstruction, codes [B, length], weighted commitment loss)."""
        quantised, codes, commitment = self.quantiser(self.encoded(images))
        return self.render(quantised), codes, self.config.commitment * commitment

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [-1, 1] -> codes [B, length], int64."""
        return self.quantiser.nearest(self.read(images))

    def decoder_input(self, found: Tensor) -> Tensor:
        """The code vectors of codes [B, length]: [B, length, C]."""
        return self.codebook[found]

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B, length] -> images [B, 3, H, W] in [-1, 1], float32."""
        if codes.ndim != 2 or codes.shape[1] != self.length:
            raise InputError(f"codes are {tuple(codes.shape)}; it draws from [B, {self.length}].")
        return self.redraw(codes)

    def reader(self) -> Reader:
        """What it makes of pictures, as trainings ask for it; its convolutions are laid out channels last."""
        key = (*self.key(), checksum(self.codebook))
        return Reader(
            self.config.size, self.length, self.config.codes, key, self.encode, self.codebook.device
        )

    def weights(self) -> dict[str, Tensor]:
        """What a model folder holds: everything but the quantiser's moving statistics."""
        return {name: tensor for name, tensor in self.state_dict().items() if name not in MOVING}


def channels_last(module: M) -> M:
    """The same module with its convolutions laid out channels last, as CPUs and tensor cores prefer."""
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module
