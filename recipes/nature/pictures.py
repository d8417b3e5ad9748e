"""Pictures with captions from an imagefolder, decoded once and kept in memory; batches are crops of them. Sheets of pictures as PNG."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from lanternpp.evaluation.pictures import to_pixels
from lanternpp.training.codes import evenly_spaced
from lanternpp.training.pictures import read_rows
from lanternpp.util.files import digest, replacing


@dataclass(frozen=True)
class Pictures:
    """A split in memory: pixels [M, 3, H, W] uint8, padded; sizes [M, 2] (height, width); M captions and labels."""

    pixels: Tensor
    sizes: Tensor
    size: int
    key: str  # a hash of the split's file list
    texts: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    skipped: tuple[str, ...] = ()

    @classmethod
    def read(cls, data: str | Path, split: str, size: int, limit: int | None = None) -> Pictures:
        """Decode a split in a thread pool. Unreadable pictures are named in a warning and left out. InputError where they are many."""
        rows = read_rows(data, split, limit)
        images = rows.decode(range(len(rows.files)), size)
        rows.warn()
        kept = [to_pixels(image) for image in images.values()]
        sizes = torch.tensor([picture.shape[1:] for picture in kept])
        pixels = torch.zeros(len(kept), 3, *sizes.amax(0).tolist(), dtype=torch.uint8)
        for row, picture in zip(pixels, kept, strict=True):
            row[:, : picture.shape[1], : picture.shape[2]] = picture
        texts, labels = (tuple(each[i] for i in images) for each in (rows.texts, rows.labels))
        files = tuple(rows.root / rows.files[i] for i in images)
        return cls(pixels, sizes, size, rows.key, texts, labels, files, tuple(rows.bad))

    def __len__(self) -> int:
        return self.pixels.shape[0]

    def to(self, device: torch.device | str) -> Pictures:
        """The pixels on a device, where crops are then made."""
        return Pictures(self.pixels.to(device), self.sizes.to(device), self.size, self.key)

    def crops(self, index: Tensor, place: Tensor, flip: Tensor, zoom: Tensor) -> Tensor:
        """Square crops in [-1, 1] of pictures index [B] -> [B, 3, size, size].

        `place` [B, 2] and `zoom` [B] lie in 0..1; zoom 0 is a square of `size` pixels, 1 of the whole short
        side. `flip` [B] mirrors.
        """
        device = self.pixels.device
        index, place, flip, zoom = (to_device(x, device) for x in (index, place, flip, zoom))
        sizes = self.sizes[index].float()  # [B, 2]
        short = sizes.amin(1)
        side = short.clamp_max(self.size).lerp(short, zoom)[:, None]  # [B, 1]
        middle = place * (sizes - side) + side / 2  # [B, 2] (row, column), in pixels
        steps = (torch.arange(self.size, device=device) + 0.5) / self.size - 0.5
        across = torch.where(flip, -1.0, 1.0)[:, None] * steps
        height, width = self.pixels.shape[2:]
        rows = (middle[:, :1] + side * steps) / height * 2 - 1  # [B, size]
        columns = (middle[:, 1:] + side * across) / width * 2 - 1
        grid = torch.stack(torch.broadcast_tensors(columns[:, None, :], rows[:, :, None]), -1)
        images = F.grid_sample(self.pixels[index].float(), grid, "bilinear", "border", align_corners=False)
        return images / 127.5 - 1

    def random(self, generator: torch.Generator, index: Tensor) -> Tensor:
        """Random crops with scale jitter and flips of pictures [B]."""
        draw = torch.rand(4, index.shape[0], generator=generator)
        return self.crops(index, draw[:2].t(), draw[2] < 0.5, draw[3])

    def centre(self, index: Tensor) -> Tensor:
        """The central square of pictures [B]."""
        one = torch.ones(index.shape[0])
        return self.crops(index, one[:, None].expand(-1, 2) / 2, one < 0, one)

    def centres(self, batch: int, most: int | None = None) -> Iterator[Tensor]:
        """Central squares in order, at most `batch` at a time: of all pictures, or of `most` evenly over them."""
        index = torch.arange(len(self)) if most is None else evenly_spaced(len(self), most)
        for part in index.split(batch):
            yield self.centre(part)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small host tensor on a device, without waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def describe(train: Pictures, val: Pictures, data: str | Path) -> dict[str, Any]:
    """The provenance entry for a data folder."""
    return {
        "folder": Path(data).resolve().name,
        "train": len(train),
        "val": len(val),
        "skipped": [*train.skipped, *val.skipped][:20],
        "hash": digest([train.key, val.key]),
    }


def to_bytes(images: Tensor) -> Tensor:
    """Images [B, 3, H, W] in [-1, 1] -> [B, H, W, 3] uint8 on the CPU."""
    levels = (images.detach().float().cpu().clamp(-1, 1) + 1) * 127.5
    return levels.round().to(torch.uint8).permute(0, 2, 3, 1)


def sheet(images: Tensor, columns: int, path: Path) -> None:
    """Images [B, 3, H, W] in rows of `columns` as one PNG."""
    pixels = to_bytes(images)
    pixels = pixels[: len(pixels) // columns * columns]
    _, height, width, _ = pixels.shape
    square = pixels.view(-1, columns, height, width, 3).transpose(1, 2).reshape(-1, columns * width, 3)
    with replacing(path) as temporary:
        Image.fromarray(square.contiguous().numpy()).save(temporary, format="PNG")
