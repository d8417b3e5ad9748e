"""Our tokenizers, from their folders: convolutional autoencoders (VQGAN, arXiv 2012.09841) of codes or of continuous latents.

Codes index a codebook (VQ-VAE, 1711.00937) on the unit sphere (ViT-VQGAN, 2110.04627, section 3.2). A latent is drawn from a Gaussian
over C channels, held to a standard normal distribution by the Kullback-Leibler divergence under a small weight
(1312.6114; the KL-regularised autoencoder of 2112.10752, section 3.1).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.vq.codes import Reader, argmax, hashes
from lanternpp.models.vq.vqgan import Attention, Residual, channels_last, norm
from lanternpp.nn import checkpoints
from lanternpp.nn.checkpoints import Codes, StageBlocks, Stages, Width, config_as
from lanternpp.nn.sources import SAME, Source, blank
from lanternpp.util.jsonfile import Between

A = TypeVar("A", bound="Autoencoder")
KIND: Literal["kl"] = "kl"  # the `kind` in the config of a tokenizer of latents
MAX_LOG_VAR = 10.0  # maximum absolute logarithm of a latent's variance


@dataclass(frozen=True)
class Stacks:
    """The shape of encoder and decoder. Stages run from fine to coarse, each half as wide and high as the one before."""

    size: Annotated[int, Between(1, 1 << 12)] = 128  # pixels of an image's side
    dim: Width = 8  # C, of a latent
    channels: Stages = (32, 128, 256)  # at 1/2, 1/4, 1/8 of the size
    encoder_blocks: StageBlocks = (1, 1, 2)
    decoder_blocks: StageBlocks = (1, 2, 3)
    thin: Width = 16  # channels of the decoder's last blocks, at full size
    kind: Literal["vq", "kl"] = "vq"

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


@dataclass(frozen=True)
class VQConfig(Stacks):
    """The shape of a tokenizer of codes."""

    codes: Codes = 4096  # V
    commitment: Annotated[float, Between(0, 1000)] = 0.25


@dataclass(frozen=True)
class KLConfig(Stacks):
    """The shape of a tokenizer of latents."""

    dim: Width = 16
    kl: Annotated[float, Between(0, 1000)] = 1e-3  # weight of the divergence, in nats per channel
    kind: Literal["vq", "kl"] = KIND


def groups(channels: int) -> int:
    """Return the number of groups of a normalisation, of 16 channels each."""
    return max(channels // 16, 1)


def block(channels: int) -> Residual:
    """Return a residual block, initialised as the identity."""
    residual = Residual(channels, channels, groups=groups(channels))
    nn.init.zeros_(residual.conv2.weight)
    return residual


def attention(channels: int) -> Attention:
    """Return self-attention for the coarsest stage, in heads of 64 channels, initialised as the identity."""
    layer = Attention(channels, groups=groups(channels), heads=max(channels // 64, 1))
    nn.init.zeros_(layer.out.weight)
    return layer


def upsample(inputs: int, outputs: int) -> nn.Module:
    """Return a layer [B, inputs, H, W] -> [B, outputs, 2H, 2W]: pixels are doubled by repetition, then convolved 3x3."""
    twice, conv = nn.Upsample(scale_factor=2.0, mode="nearest"), nn.Conv2d(inputs, outputs, 3, padding=1)
    return nn.Sequential(OrderedDict(twice=twice, conv=conv))


def encoder(config: Stacks, outputs: int) -> nn.Sequential:
    """Return an encoder of images [B, 3, H, W] as latents before normalisation, or moments, [B, outputs, H/down, W/down]."""
    width = config.channels[0]
    layers: list[nn.Module] = [nn.PixelUnshuffle(2), nn.Conv2d(12, width, 3, padding=1)]
    for stage, (channels, blocks) in enumerate(zip(config.channels, config.encoder_blocks, strict=True)):
        if stage:
            layers.append(nn.Conv2d(width, channels, 3, stride=2, padding=1))
        layers += [block(channels) for _ in range(blocks)]
        width = channels
    layers += [attention(width), norm(width, groups=groups(width)), nn.SiLU(), nn.Conv2d(width, outputs, 1)]
    return nn.Sequential(*layers)


def decoder(config: Stacks) -> nn.Sequential:
    """Return a decoder of latents [B, C, H/down, W/down] to images [B, 3, H, W], which are not clamped."""
    coarsest, thin = config.channels[-1], config.thin
    layers: list[nn.Module] = [nn.Conv2d(config.dim, coarsest, 3, padding=1), attention(coarsest)]
    inputs, outputs = config.channels[::-1], (*config.channels[-2::-1], thin)
    for channels, next_channels, blocks in zip(inputs, outputs, config.decoder_blocks[::-1], strict=True):
        layers += [block(channels) for _ in range(blocks)]
        layers.append(upsample(channels, next_channels))
    layers += [block(thin), norm(thin, groups=groups(thin)), nn.SiLU(), nn.Conv2d(thin, 3, 3, padding=1)]
    return nn.Sequential(*layers)


class Autoencoder(nn.Module):
    """A tokenizer: an encoder, a decoder, and codes or latents between them."""

    config_class: ClassVar[type[Stacks]]
    about: ClassVar[str]  # its kind, for a message if the other kind is needed
    encoder: nn.Sequential
    decoder: nn.Sequential
    quantiser: Quantiser  # of a tokenizer of codes
    vocab = 0  # V, of a tokenizer of codes

    def __init__(self, config: Stacks):
        super().__init__()
        self.config = config
        self.channels, self.length = config.dim, config.grid**2

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Encode images [B, 3, H, W] in [-1, 1] as codes [B, length] int64, or moments of latents [B, length, 2 C] float32."""
        encoded = self.encoded(images)
        return self.quantiser.nearest(encoded) if self.vocab else clamped(encoded)

    def reader(self) -> Reader:
        """Lay convolutions out channels last, and return the reader of pictures as codes or moments of latents."""
        key = hashes(channels_last(self).encoder)
        if self.vocab:
            key += hashes(self.quantiser.codebook)
        each = () if self.vocab else (2 * self.channels,)
        device = next(self.parameters()).device
        return Reader(self.config.size, self.length, self.vocab, key, self.encode, device, each)

    def encoded(self, images: Tensor) -> Tensor:
        """Return the encoder's output for images [B, 3, size, size], [B, length, outputs]."""
        images = images.to(self.dtype).contiguous(memory_format=torch.channels_last)
        return self.encoder(images).flatten(2).transpose(1, 2)

    def render(self, latents: Tensor) -> Tensor:
        """Decode latents [B, length, C] to images [B, 3, H, W], which are not clamped."""
        grid = self.config.grid
        x = latents.transpose(1, 2).unflatten(2, (grid, grid))
        return self.decoder(x.contiguous(memory_format=torch.channels_last)).float()

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes [B, length], or latents [B, length, C], to images [B, 3, H, W] in [-1, 1], float32."""
        latents = self.quantiser.codebook[codes] if self.vocab else codes
        return self.render(latents.to(self.dtype)).clamp(-1, 1)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the convolutions."""
        return next(self.decoder.parameters()).dtype


class Quantiser(nn.Module):
    """The nearest row of an l2-normalised codebook."""

    codebook: Tensor  # [V, C], unit rows

    def __init__(self, codes: int, dim: int):
        super().__init__()
        codebook = F.normalize(nn.init.normal_(torch.empty(codes, dim, dtype=torch.float32)), dim=-1)
        self.register_buffer("codebook", codebook)

    def nearest(self, latents: Tensor) -> Tensor:
        """Return the codes [...] of the codebook rows nearest to latents [..., C]."""
        flat = F.normalize(latents.float(), dim=-1).flatten(0, -2)
        rows = 32768 if flat.is_cuda else 64  # so that the scores stay in a CPU's cache
        with torch.autocast(flat.device.type, enabled=False):
            codes = [argmax(part @ self.codebook.t()) for part in flat.split(rows)]  # scores [rows, V]
        return torch.cat(codes).view(latents.shape[:-1])


class VQ(Autoencoder):
    """A tokenizer of codes in raster order, for images in [-1, 1]."""

    config_class = VQConfig
    about = f"a tokenizer of codes: for latents, train one with `python recipes/nature/tokenizer.py --kind {KIND}`."
    config: VQConfig
    quantiser_class: type[Quantiser] = Quantiser

    def __init__(self, config: VQConfig):
        super().__init__(config)
        self.vocab = config.codes
        self.encoder = encoder(config, config.dim)
        self.quantiser = self.quantiser_class(config.codes, config.dim)
        self.decoder = decoder(config)

    @property
    def codebook(self) -> Tensor:
        """[V, C], unit rows."""
        return self.quantiser.codebook


class KL(Autoencoder):
    """A tokenizer of latents in raster order. `encode` returns the moments of each latent: C means, then C log variances."""

    config_class = KLConfig
    about = "a tokenizer of continuous latents and has no codes: a target over it has --head mixture or diffusion."
    config: KLConfig

    def __init__(self, config: KLConfig):
        super().__init__(config)
        self.encoder, self.decoder = encoder(config, 2 * config.dim), decoder(config)


def clamped(moments: Tensor) -> Tensor:
    """Return the encoder's output [..., 2 C] as moments in float32, with log variances within `MAX_LOG_VAR`."""
    mean, log_var = moments.float().chunk(2, -1)
    return torch.cat((mean, log_var.clamp(-MAX_LOG_VAR, MAX_LOG_VAR)), -1)


def sampled(moments: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw latents [..., C] from moments [..., 2 C]; generator: of the CPU."""
    mean, log_var = moments.float().chunk(2, -1)
    noise = torch.randn(mean.shape, generator=generator).to(mean.device)
    return mean + (log_var / 2).exp() * noise


def read_tokenizer(folder: Path, dtype: torch.dtype = torch.float32, *, kind: type[A]) -> A:
    """Read the tokenizer in `folder` to the CPU, its convolutions in `dtype`, a codebook in float32. Raise InputError if it is no `kind`."""
    fields = checkpoints.load_config(folder)
    cls: type[Autoencoder] = KL if fields.get("kind") == KIND else VQ
    if not issubclass(cls, kind):
        raise InputError(f"{folder} is {cls.about}")
    with blank(folder):
        tokenizer = cls(config_as(cls.config_class, fields, folder))
    Source.open(folder / checkpoints.WEIGHTS).fill(tokenizer, [SAME], dtype)
    return tokenizer.eval().requires_grad_(False)


read_vq, read_kl = partial(read_tokenizer, kind=VQ), partial(read_tokenizer, kind=KL)
