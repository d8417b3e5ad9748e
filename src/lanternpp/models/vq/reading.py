"""Pictures to codes: the encoder side of any tokenizer, as trainings use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.vq.quantiser import argmax
from lanternpp.nn.checkpoints import checksum


@dataclass(frozen=True)
class Reader:
    """How a target's codes of a square picture, or the moments of its latents, are found."""

    size: int  # pixels of a picture's side
    length: int  # codes of a picture, row ends included
    codes: int  # V; 0 of latents
    key: tuple[str, ...]  # hashes of the weights that decide the codes
    encode: Callable[[Tensor], Tensor]  # images [B, 3, size, size] in [-1, 1] -> codes [B, length] int64
    device: torch.device
    stored: torch.dtype = torch.uint16  # how a cache on disk keeps what it finds
    each: tuple[int, ...] = ()  # shape of what it finds at a place: of moments, (2 C,)

    @classmethod
    def of(
        cls,
        encoder: nn.Module | None,
        book: Tensor,
        size: int,
        length: int,
        lay: Callable[[Tensor], Tensor],
    ) -> Self:
        """What a published tokenizer reads: its encoder, images [B, 3, H, W] -> latents [B, C, rows, columns], and codebook [V, C].

        lay: codes of a grid [B, rows, columns] -> of a picture [B, length]. Raises InputError where there is no encoder.
        """
        if encoder is None:
            raise InputError(
                "this model's tokenizer was kept without its encoder, so it reads no pictures: use --self "
                "instead of --data, or the model as it was published."
            )
        plain = (
            x.float().clone(memory_format=torch.contiguous_format) for x in encoder.state_dict().values()
        )
        key = (*map(checksum, plain), checksum(book))
        like = next(encoder.parameters())

        @torch.no_grad()
        def encode(images: Tensor) -> Tensor:
            return lay(nearest(encoder(images.to(like.dtype)), book))

        return cls(size, length, len(book), key, encode, like.device)


@torch.no_grad()
def nearest(latents: Tensor, codebook: Tensor) -> Tensor:
    """latents [B, C, rows, columns] -> the codes [B, rows, columns] of least distance in codebook [V, C].

    Under a codebook of unit rows the length of a latent does not matter, so it is not normalised first.
    """
    flat = latents.float().permute(0, 2, 3, 1).flatten(0, -2)
    book = codebook.float()
    half = book.square().sum(1) / 2
    codes = torch.cat([argmax(part @ book.t() - half) for part in flat.split(4096)])
    return codes.view(latents.shape[0], *latents.shape[2:])
