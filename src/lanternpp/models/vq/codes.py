"""Codes of pictures by the encoder of any tokenizer, and the k nearest codes of every code (the papers' proximity set)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.nn.checkpoints import checksum, read_safetensors, write_safetensors
from lanternpp.nn.files import NEIGHBOURS
from lanternpp.util.files import user_cache
from lanternpp.util.terminal import track

CHUNK_ROWS = 64  # codes whose distances are computed at once and stay in the L2 cache
MAX_UINT16_CODES = 1 << 16  # the largest vocabulary whose codes fit in 16 bits
MIN_PROGRESS_CODES = 1 << 15  # the smallest vocabulary with a progress bar
PAIRWISE = "donot_use_mm_for_euclid_dist"  # a mode of torch.cdist without the rounding of matrix products


@dataclass(frozen=True)
class Reader:
    """The encoder of square pictures to a target's codes, or to the moments of its latents."""

    size: int  # pixels of a picture's side
    length: int  # codes of a picture, row ends included
    codes: int  # V; 0 for latents
    key: tuple[str, ...]  # hashes of the weights that determine the codes
    encode: Callable[[Tensor], Tensor]  # images [B, 3, size, size] in [-1, 1] -> [B, length, *item_shape]
    device: torch.device
    item_shape: tuple[int, ...] = ()  # () for codes, (2 C,) for moments

    @classmethod
    def of(
        cls,
        encoder: nn.Module,
        codebook: Tensor,
        size: int,
        length: int,
        lay: Callable[[Tensor], Tensor],
        by_product: bool = False,
    ) -> Self:
        """Return the reader of a published tokenizer with codebook [V, C].

        encoder: images [B, 3, H, W] -> latents [B, C, rows, columns]. lay: codes of a grid [B, rows, columns] -> codes of a picture
        [B, length]. by_product: as for `nearest`.
        """
        like = next(encoder.parameters())

        @torch.no_grad()
        def encode(images: Tensor) -> Tensor:
            return lay(nearest(encoder(images.to(like.dtype)), codebook, by_product))

        return cls(size, length, len(codebook), hashes(encoder) + hashes(codebook), encode, like.device)


def storage_dtype(codes: int) -> torch.dtype:
    """Return the dtype in a cache on disk of the codes of a vocabulary; with a vocabulary of 0, of latents and moments."""
    if not codes:
        return torch.float16
    return torch.uint16 if codes <= MAX_UINT16_CODES else torch.int32


def hashes(weights: nn.Module | Tensor) -> tuple[str, ...]:
    """Return the checksums of weights in bfloat16, which do not depend on the dtype and layout of the weights."""
    tensors = weights.state_dict().values() if isinstance(weights, nn.Module) else (weights,)
    return tuple(checksum(tensor.bfloat16()) for tensor in tensors)


def argmax(scores: Tensor, side: int = 64) -> Tensor:
    """Return the first column of the maximum of scores [M, V] as [M]; by blocks, since amax is vectorised and argmax is not."""
    if scores.shape[1] % side:
        return scores.argmax(1)
    blocks = scores.unflatten(1, (-1, side))  # [M, V / side, side]
    best_block = blocks.amax(2).argmax(1)  # [M]
    block_scores = blocks.gather(1, best_block[:, None, None].expand(-1, 1, side))[:, 0]  # [M, side]
    return best_block * side + block_scores.argmax(1)


@torch.no_grad()
def nearest(latents: Tensor, codebook: Tensor, by_product: bool = False) -> Tensor:
    """Return the codes [B, rows, columns] of the rows of codebook [V, C] nearest to latents [B, C, rows, columns].

    by_product: by the largest product instead of the smallest distance. For a codebook of unit rows the length of a latent does
    not change its code, so latents are not normalised.
    """
    flat = latents.float().permute(0, 2, 3, 1).flatten(0, -2)  # [B rows columns, C]
    book = codebook.float()
    # |x - b|^2 / 2 is smallest for the b with the largest x b - |b|^2 / 2.
    half_norms = 0 if by_product else book.square().sum(1) / 2
    codes = torch.cat([argmax(part @ book.t() - half_norms) for part in flat.split(4096)])
    return codes.view(latents.shape[0], *latents.shape[2:])


def resized(picture: Image.Image, count: int, side: int) -> Tensor:
    """Return an RGB picture in its own shape, up to `count` to 1, of about `count` squares of `side` pixels: [1, 3, H, W] in [-1, 1]."""
    ratio = min(max(picture.width / picture.height, 1 / count), count)
    height = int((count * side * side / ratio) ** 0.5)
    width, height = (max((pixels + side // 2) // side, 1) * side for pixels in (int(height * ratio), height))
    array = np.array(picture.resize((width, height), Image.Resampling.BICUBIC))
    return torch.from_numpy(array / 127.5 - 1).permute(2, 0, 1)[None]


def check_neighbours(k: int, vocab: int) -> None:
    """Check that each of `vocab` codes can have k neighbours; raise InputError if it cannot."""
    if not 1 <= k < vocab:
        raise InputError(f"{k} neighbours of a codebook of {vocab} codes; use 1 to {vocab - 1}")


def neighbours(codebook: Tensor, k: int, folder: Path | None = None) -> Tensor:
    """Return the k codes nearest to every code of codebook [V, C] by l2, nearest first and without the code itself, [V, k] int32.

    The table is saved in `folder` under the codebook's checksum and read the next time; a warning is given if the folder cannot
    be written. Raise InputError unless 1 <= k <= V - 1.
    """
    vocab = len(codebook)
    check_neighbours(k, vocab)
    path = folder / f"{NEIGHBOURS}{checksum(codebook)}-{k}.safetensors" if folder else None
    saved = _read_table(path, (vocab, k)) if path else None
    if saved is not None:
        return saved
    book = codebook.detach().float()
    table = torch.empty(vocab, k, dtype=torch.int32, device=book.device)
    chunks = torch.arange(vocab, device=book.device).split(CHUNK_ROWS)
    for codes in track("codebook neighbours", chunks) if vocab >= MIN_PROGRESS_CODES else chunks:
        distance = torch.cdist(book[codes], book, compute_mode=PAIRWISE)  # [CHUNK_ROWS, V]
        distance.scatter_(1, codes[:, None], float("inf"))
        table[codes] = distance.topk(k, 1, largest=False).indices.int()
    if path:
        try:
            write_safetensors(path, {"neighbours": table.cpu()})
        except InputError as error:
            warnings.warn(
                f"the table of codebook neighbours is not kept for the next run: {error}", stacklevel=2
            )
    return table


def _read_table(path: Path, shape: tuple[int, int]) -> Tensor | None:
    """Read the table of an earlier run; return None if there is none, or its file is damaged."""
    try:
        table = read_safetensors(path)["neighbours"]
    except (InputError, KeyError):
        return None
    fits = table.shape == shape and table.dtype == torch.int32
    return table if fits and 0 <= int(table.min()) and int(table.max()) < shape[0] else None


def cache_folder(model: Path) -> Path:
    """Return the folder for derived tables: a model's, or the user's cache if that is read-only or part of this package."""
    package = Path(__file__).resolve().parents[2]
    if os.access(model, os.W_OK) and package not in model.resolve().parents:
        return model
    return user_cache()
