"""Pictures with captions from an imagefolder, decoded once and kept in memory; batches are crops of them."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.util.files import digest
from lanternpp.util.jsonfile import LINES, parse_json, read_text

SUFFIXES = frozenset((".webp", ".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff"))
MARGIN = 1.125  # pictures are kept with this much of the training size on their short side
STRETCH = 4 / 3  # and at most this much longer than wide
CORRUPT = 0.01  # share of unreadable pictures above which a folder is refused


class DataWarning(UserWarning):
    """A part of the data that is left out."""


@dataclass(frozen=True)
class Rows:
    """The entries of a split's metadata: files with captions and labels, sorted by file name."""

    root: Path
    files: tuple[str, ...]
    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()  # "" where a line has none

    @property
    def key(self) -> str:
        """A hash of the file list with sizes and captions."""
        paths = [self.root / name for name in self.files]
        sizes = [str(path.stat().st_size) for path in paths if path.is_file()]
        return digest([*self.files, *self.texts, *sizes])


def read_rows(data: str | Path, split: str) -> Rows:
    """The rows of `data/split/metadata.jsonl`, or those of `data/metadata.jsonl` that lie under `split/`."""
    data = Path(data)
    if not data.is_dir():
        raise InputError(f"{data} is no folder: --data takes an imagefolder with train/ and val/.")
    root = data / split
    if not root.is_dir():
        raise InputError(f"{root} is missing: an imagefolder for training has train/ and val/.")
    own_file, shared_file = root / "metadata.jsonl", data / "metadata.jsonl"
    if own_file.is_file():
        rows = read_jsonl(own_file)
    elif shared_file.is_file():
        rows = [
            (name.removeprefix(f"{split}/"), *rest)
            for name, *rest in read_jsonl(shared_file)
            if name.startswith(f"{split}/")
        ]
    else:
        raise InputError(f"{own_file} is missing: it has a line with file_name and text for each picture.")
    if not rows:
        pictures = sum(path.suffix.lower() in SUFFIXES for path in root.rglob("*"))
        raise InputError(f"{root} has no captions: its metadata.jsonl names none of the {pictures} pictures.")
    rows = [row for _, row in sorted({row[0]: row for row in rows}.items())]
    names, texts, labels = zip(*rows, strict=True)
    return Rows(root, names, texts, labels)


def read_jsonl(path: Path) -> list[tuple[str, ...]]:
    """(file_name, text, label) of every line; one without the first two is an error that names it."""
    rows: list[tuple[str, ...]] = []
    for number, line in enumerate(read_text(path, "save it as UTF-8", LINES).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, "it")
            name, text = row["file_name"], row["text"]
        except (InputError, TypeError):
            raise InputError(f"{path}, line {number}, is not a JSON object: {line[:60]!r}.") from None
        except KeyError as missing:
            raise InputError(
                f"{path}, line {number}, has no {missing}: file_name and text are needed."
            ) from None
        if not (isinstance(name, str) and isinstance(text, str)):
            raise InputError(f"{path}, line {number}: file_name and text must be strings.")
        rows.append((name, text, str(row.get("label") or "")))
    return rows


class Pictures:
    """A split in memory: pixels [M, 3, H, W] uint8, padded; sizes [M, 2] (height, width); M captions."""

    def __init__(
        self,
        pixels: Tensor,
        sizes: Tensor,
        texts: tuple[str, ...],
        skipped: tuple[str, ...],
        key: str,
        size: int,
    ):
        self.pixels, self.sizes, self.texts, self.skipped, self.size = pixels, sizes, texts, skipped, size
        self.key = key  # a hash of the split's file list

    @classmethod
    def read(cls, data: str | Path, split: str, size: int, limit: int | None = None) -> Pictures:
        """Decode a split in a thread pool. Unreadable pictures are named in a warning and left out."""
        rows = read_rows(data, split)
        names, texts = rows.files[:limit], rows.texts[:limit]
        short, long = math.ceil(size * MARGIN), math.ceil(size * MARGIN * STRETCH)
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
            decoded = list(pool.map(lambda name: decode(rows.root / name, short, long), names))
        good = [i for i, picture in enumerate(decoded) if isinstance(picture, Tensor)]
        bad = {name: why for name, why in zip(names, decoded, strict=True) if isinstance(why, str)}
        first = "; ".join(f"{name} ({why})" for name, why in list(bad.items())[:5])
        if len(bad) > CORRUPT * len(names):
            raise InputError(
                f"{len(bad)} of {len(names)} pictures in {rows.root} are unreadable, e.g. {first}: "
                "repair them or take their lines out of metadata.jsonl."
            )
        if bad:
            warnings.warn(
                f"{len(bad)} of {len(names)} pictures skipped in {rows.root}: {first}",
                DataWarning,
                stacklevel=2,
            )
        kept = [picture for picture in decoded if isinstance(picture, Tensor)]
        sizes = torch.tensor([picture.shape[1:] for picture in kept])
        height, width = sizes.amax(0).tolist()
        pixels = torch.zeros(len(kept), 3, height, width, dtype=torch.uint8)
        for row, picture in zip(pixels, kept, strict=True):
            row[:, : picture.shape[1], : picture.shape[2]] = picture
        return cls(pixels, sizes, tuple(texts[i] for i in good), tuple(bad), rows.key, size)

    def __len__(self) -> int:
        return self.pixels.shape[0]

    def to(self, device: torch.device | str) -> Pictures:
        """The same pictures on a device, where crops are then made."""
        return Pictures(
            self.pixels.to(device), self.sizes.to(device), self.texts, self.skipped, self.key, self.size
        )

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
        """The whole central square of pictures [B]."""
        one = torch.ones(index.shape[0])
        return self.crops(index, one[:, None].expand(-1, 2) / 2, one < 0, one)

    def centres(self, batch: int, most: int | None = None) -> Iterator[Tensor]:
        """Central squares in order, at most `batch` at a time: of all pictures, or of `most` evenly over them."""
        index = torch.arange(len(self)) if most is None else evenly_spaced(len(self), most)
        for part in index.split(batch):
            yield self.centre(part)


def evenly_spaced(count: int, most: int) -> Tensor:
    """At most `most` indices, evenly over `count`."""
    return torch.linspace(0, count - 1, min(count, most)).round().long()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small host tensor on a device, without waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def decode(path: Path, short: int, long: int) -> Tensor | str:
    """A picture as [3, H, W] uint8, short side `short`, cut to `long` at most; or why it cannot be read."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file).convert("RGB")
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return str(error).replace(str(path), "").strip(" '") or type(error).__name__
    scale = short / min(image.size)
    if scale != 1:
        shape = (max(round(image.width * scale), short), max(round(image.height * scale), short))
        image = image.resize(shape, Image.Resampling.LANCZOS)
    left, top = max(image.width - long, 0) // 2, max(image.height - long, 0) // 2
    image = image.crop((left, top, left + min(image.width, long), top + min(image.height, long)))
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1)


class BatchSampler:
    """The pictures of a step, and a generator for its noise: functions of (seed, step), so a resumed run repeats them."""

    def __init__(self, count: int, batch: int, seed: int):
        self.count, self.batch, self.seed = count, min(batch, count), seed
        self.per_epoch = count // self.batch
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def __call__(self, step: int) -> tuple[Tensor, torch.Generator]:
        """(indices [B], generator) of a step."""
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._order = torch.randperm(self.count, generator=generator(self.seed, epoch, 0))
            self._epoch = epoch
        return self._order[place * self.batch :][: self.batch], generator(self.seed, step, 1)


def generator(*parts: int) -> torch.Generator:
    """A CPU generator seeded by a tuple of integers."""
    return torch.Generator().manual_seed(int(digest([str(part) for part in parts])[:15], 16))


def describe(train: Pictures, val: Pictures, data: str | Path) -> dict[str, Any]:
    """The provenance entry for a data folder."""
    return {
        "folder": Path(data).resolve().name,
        "train": len(train),
        "val": len(val),
        "skipped": [*train.skipped, *val.skipped][:20],
        "hash": digest([train.key, val.key]),
    }
