"""Captioned pictures in a folder: what its metadata says, and square crops of its files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.util.files import digest
from lanternpp.util.jsonfile import LINES, parse_json, read_text

SUFFIXES = frozenset((".webp", ".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff"))
MARGIN = 1.125  # pictures are kept with this much of the training size on their short side
STRETCH = 4 / 3  # and at most this much longer than wide


@dataclass(frozen=True)
class Rows:
    """The entries of a split's metadata: files with captions and labels, sorted by file name."""

    root: Path
    files: tuple[str, ...]
    texts: tuple[str, ...]
    labels: tuple[str, ...]  # "" where a line has none

    @property
    def key(self) -> str:
        """A hash of the file list with sizes and captions."""
        paths = [self.root / name for name in self.files]
        sizes = [str(path.stat().st_size) for path in paths if path.is_file()]
        return digest([*self.files, *self.texts, *sizes])


def read_rows(data: str | Path, split: str, limit: int | None = None) -> Rows:
    """The rows of `data/split/metadata.jsonl`, or those of `data/metadata.jsonl` that lie under `split/`; the first `limit`."""
    data = Path(data)
    if not data.is_dir():
        raise InputError(f"{data} is no folder: --data takes an imagefolder with train/ and val/.")
    root = data / split
    if not root.is_dir():
        raise InputError(f"{root} is missing: an imagefolder for training has train/ and val/.")
    own, shared = root / "metadata.jsonl", data / "metadata.jsonl"
    if own.is_file():
        rows = read_jsonl(own)
    elif shared.is_file():
        below = f"{split}/"
        rows = [
            (row[0].removeprefix(below), *row[1:]) for row in read_jsonl(shared) if row[0].startswith(below)
        ]
    else:
        raise InputError(f"{own} is missing: it has a line with file_name and text for each picture.")
    if not rows:
        pictures = sum(path.suffix.lower() in SUFFIXES for path in root.rglob("*"))
        raise InputError(f"{root} has no captions: its metadata.jsonl names none of the {pictures} pictures.")
    rows = [row for _, row in sorted({row[0]: row for row in rows}.items())][:limit]
    return Rows(root, *zip(*rows, strict=True))


def read_jsonl(path: Path) -> list[tuple[str, ...]]:
    """(file_name, text, label) of every line. InputError names a line without the first two."""
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


def decode(path: Path, size: int) -> Any:
    """A picture as a PIL image, somewhat larger than `size` on its short side and not very long; or why it cannot be read."""
    from PIL import Image, ImageOps

    short, long = math.ceil(size * MARGIN), math.ceil(size * MARGIN * STRETCH)
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
    return image.crop((left, top, left + min(image.width, long), top + min(image.height, long)))


def crop(image: Any, size: int, across: float, down: float, zoom: float, mirror: bool) -> Tensor:
    """A square of a PIL image as [3, size, size] in [-1, 1].

    across, down: where, 0..1; zoom: 0 is a square of `size` pixels, 1 one of the whole short side.
    """
    from PIL import Image, ImageOps

    short = min(image.size)
    side = min(short, size) + zoom * (short - min(short, size))
    left, top = across * (image.width - side), down * (image.height - side)
    image = image.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
    return to_pixels(ImageOps.mirror(image) if mirror else image) / 127.5 - 1


def to_pixels(image: Any) -> Tensor:
    """A PIL image as [3, H, W] uint8."""
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1)
