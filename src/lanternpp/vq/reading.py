"""Pictures as codes: what a training asks of a tokenizer, whoever made it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reader:
    """How a target's codes of a square picture are found."""

    size: int  # pixels of a picture's side
    length: int  # codes of a picture, whatever ends its rows among them
    codes: int  # V
    key: tuple[str, ...]  # hashes of the weights that decide the codes
    encode: Callable[[Tensor], Tensor]  # images [B, 3, size, size] in [-1, 1] -> codes [B, length] int64
    device: torch.device
