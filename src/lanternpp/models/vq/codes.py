"""Codes of pictures, by the encoder side of any tokenizer, and the k nearest codes of every code (the papers' proximity set)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.nn.checkpoints import checksum
from lanternpp.nn.files import NEIGHBOURS
from lanternpp.util.files import replacing, user_cache
from lanternpp.util.terminal import progress_bar

ROWS = 64  # codes whose distances are computed at once: they stay in the L2 cache
SHORT = 1 << 16  # codes that 16 bits can number
LARGE = 1 << 15  # codes from which on there is a progress bar
PAIRWISE = "donot_use_mm_for_euclid_dist"  # of torch.cdist: without the rounding of products


@dataclass(frozen=True)
class Reader:
    """How a target's codes of a square picture, or the moments of its latents, are found."""

    size: int  # pixels of a picture's side
    length: int  # codes of a picture, row ends included
    codes: int  # V; 0 of latents
    key: tuple[str, ...]  # hashes of the weights that decide the codes
    encode: Callable[[Tensor], Tensor]  # images [B, 3, size, size] in [-1, 1] -> codes [B, length] int64
    device: torch.device
    each: tuple[int, ...] = ()  # shape of what it finds at a place: of moments, (2 C,)

    @property
    def stored(self) -> torch.dtype:
        """How a cache on disk keeps what it finds."""
        return stored_as(self.codes)

    @classmethod
    def of(
        cls,
        encoder: nn.Module | None,
        book: Tensor,
        size: int,
        length: int,
        lay: Callable[[Tensor], Tensor],
        by_product: bool = False,
    ) -> Self:
        """The reader of a published tokenizer: its encoder, images [B, 3, H, W] -> latents [B, C, rows, columns], and codebook [V, C].

        lay: codes of a grid [B, rows, columns] -> of a picture [B, length]. by_product: as `nearest` has it. Raises InputError where there is no encoder.
        """
        if encoder is None:
            raise InputError(
                "this model's tokenizer was kept without its encoder, so it reads no pictures: use --self "
                "instead of --data, or the model as it was published."
            )
        key = (*hashes(encoder), *hashes(book))
        like = next(encoder.parameters())

        @torch.no_grad()
        def encode(images: Tensor) -> Tensor:
            return lay(nearest(encoder(images.to(like.dtype)), book, by_product))

        return cls(size, length, len(book), key, encode, like.device)


def stored_as(codes: int) -> torch.dtype:
    """How a cache on disk keeps codes of a vocabulary, or with a vocabulary of 0 latents and their moments."""
    return torch.float16 if not codes else torch.uint16 if codes <= SHORT else torch.int32


def hashes(weights: nn.Module | Tensor) -> tuple[str, ...]:
    """The checksums of weights in bfloat16, whatever their dtype and the layout of their convolutions."""
    tensors = weights.state_dict().values() if isinstance(weights, nn.Module) else (weights,)
    return tuple(checksum(tensor.bfloat16()) for tensor in tensors)


def argmax(scores: Tensor, side: int = 64) -> Tensor:
    """The first best column of scores [M, V] -> [M]; by blocks, since amax is vectorised and argmax is not."""
    if scores.shape[1] % side:
        return scores.argmax(1)
    blocks = scores.unflatten(1, (-1, side))
    block = blocks.amax(2).argmax(1)
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, side))[:, 0].argmax(1)
    return block * side + inside


@torch.no_grad()
def nearest(latents: Tensor, codebook: Tensor, by_product: bool = False) -> Tensor:
    """latents [B, C, rows, columns] -> the codes [B, rows, columns] of least distance in codebook [V, C], or of the largest product.

    Under a codebook of unit rows the length of a latent does not matter, so it is not normalised first.
    """
    flat = latents.float().permute(0, 2, 3, 1).flatten(0, -2)
    book = codebook.float()
    half = 0 if by_product else book.square().sum(1) / 2
    codes = torch.cat([argmax(part @ book.t() - half) for part in flat.split(4096)])
    return codes.view(latents.shape[0], *latents.shape[2:])


def resized(picture: Image.Image, count: int, side: int) -> Tensor:
    """An RGB picture as [1, 3, H, W] in [-1, 1], about `count` squares of `side` pixels in its own shape."""
    ratio = picture.width / picture.height
    height = int((count * side * side / ratio) ** 0.5)
    width, height = ((one + side // 2) // side * side for one in (int(height * ratio), height))
    sized = picture.resize((max(side, width), max(side, height)), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(sized) / 127.5 - 1).permute(2, 0, 1)[None]


def check_neighbours(k: int, vocab: int) -> None:
    """InputError unless every one of `vocab` codes has k others."""
    if not 1 <= k < vocab:
        raise InputError(f"{k} neighbours of a codebook of {vocab} codes; use 1 to {vocab - 1}")


def neighbours(codebook: Tensor, k: int, folder: Path | None = None) -> Tensor:
    """codebook [V, C] -> [V, k] int32, nearest first by l2, the code itself excluded.

    Kept in `folder` under the codebook's checksum, and read from there the next time; where that folder cannot
    be written a warning says so. Raises InputError unless 1 <= k <= V - 1.
    """
    vocab = len(codebook)
    check_neighbours(k, vocab)
    path = folder / f"{NEIGHBOURS}{checksum(codebook)}-{k}.safetensors" if folder else None
    if path and (kept := _kept(path, (vocab, k))) is not None:
        return kept
    book = codebook.detach().float()
    table = torch.empty(vocab, k, dtype=torch.int32, device=book.device)
    with progress_bar("codebook neighbours") if vocab >= LARGE else nullcontext() as progress:
        for own in torch.arange(vocab, device=book.device).split(ROWS):
            distance = torch.cdist(book[own], book, compute_mode=PAIRWISE)
            distance.scatter_(1, own[:, None], float("inf"))
            table[own] = distance.topk(k, 1, largest=False).indices.int()
            if progress:
                progress(int(own[-1]) + 1, vocab)
    if path:
        try:
            with replacing(path) as temporary:
                save_file({"neighbours": table.cpu()}, temporary)
        except InputError as error:
            warnings.warn(
                f"the table of codebook neighbours is not kept for the next run: {error}", stacklevel=2
            )
    return table


def _kept(path: Path, shape: tuple[int, int]) -> Tensor | None:
    """The table of an earlier run; None where there is none, or its file is damaged."""
    if not os.access(path, os.R_OK):
        return None
    try:
        table = load_file(path)["neighbours"]
    except (SafetensorError, OSError, KeyError):
        return None
    fits = table.shape == shape and table.dtype == torch.int32
    return table if fits and 0 <= int(table.min()) and int(table.max()) < shape[0] else None


def cache_folder(beside: Path) -> Path:
    """The folder for derived tables: the model's, or the user's cache where that is read-only or part of this package."""
    shipped = Path(__file__).parents[2]
    if os.access(beside, os.W_OK) and shipped not in beside.resolve().parents:
        return beside
    return user_cache()
