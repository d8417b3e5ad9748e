"""Sheets of pictures as PNG files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lanternpp.util.files import replacing


def to_bytes(images: Tensor) -> Tensor:
    """Images [B, 3, H, W] in [-1, 1] -> [B, H, W, 3] uint8 on the CPU."""
    levels = (images.detach().float().cpu().clamp(-1, 1) + 1) * 127.5
    return levels.round().to(torch.uint8).permute(0, 2, 3, 1)


def sheet(images: Tensor, columns: int, path: Path) -> None:
    """Images [B, 3, H, W] in rows of `columns` as one PNG."""
    from PIL import Image

    pixels = to_bytes(images)
    pixels = pixels[: len(pixels) // columns * columns]
    _, height, width, _ = pixels.shape
    whole = pixels.view(-1, columns, height, width, 3).transpose(1, 2).reshape(-1, columns * width, 3)
    with replacing(path) as temporary:
        Image.fromarray(whole.contiguous().numpy()).save(temporary, format="PNG")
