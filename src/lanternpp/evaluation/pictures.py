"""Pictures in a folder, with their prompts where these are known; each is decoded when it is accessed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import torch
from PIL import Image, ImageOps
from torch import Tensor

from lanternpp.api.picture import squarest
from lanternpp.errors import InputError
from lanternpp.util.jsonfile import LINES, parse_json, read_text

SUFFIXES = frozenset((".webp", ".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff"))
METADATA = "metadata.jsonl"
GAP = 2  # pixels between the pictures of a grid that `generate` wrote
MAX_NAMED = 10  # faulty files that an error names


@dataclass(frozen=True)
class Item:
    """A picture: a file, or a part of one, and its prompt."""

    path: Path
    prompt: str | None
    box: tuple[int, int, int, int] | None = None  # left, top, right, bottom


class Gallery(Sequence[Image.Image]):
    """The pictures of a folder, in the order of their names."""

    def __init__(self, folder: Path, items: Sequence[Item]):
        self.folder, self.items = folder, tuple(items)

    @classmethod
    def read(cls, folder: Path, least: int = 1, one_size: bool = False) -> Gallery:
        """Every picture below `folder`, or those that its metadata.jsonl names; all are decoded once.

        A grid that `generate` wrote counts as the pictures it shows. Raises InputError where fewer than
        `least` are there, where some cannot be read and, with one_size, where they differ in size.
        """
        if not folder.is_dir():
            raise InputError(f"{folder} is no folder; name one that holds pictures")
        captions = read_captions(folder)
        paths = [folder / name for name in captions] if captions else list_pictures(folder)
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            found_files = list(pool.map(read_picture_file, paths))
        faults = [
            f"{path.relative_to(folder)} ({fault})"
            for path, fault in zip(paths, found_files, strict=True)
            if isinstance(fault, str)
        ]
        if faults:
            raise InputError(f"{folder} has pictures that cannot be read: {first_names(faults)}")
        items, sizes = [], {}
        for path, found in zip(paths, found_files, strict=True):
            assert isinstance(found, PictureFile)
            name = path.relative_to(folder).as_posix()
            prompt = captions.get(name) or found.prompt
            items += [Item(path, prompt, box) for box in found.boxes]
            sizes[name] = found.size
        if len(items) < least:
            raise InputError(f"{folder} holds {len(items)} pictures; at least {least} are needed")
        if one_size:
            check_sizes(folder, sizes)
        return cls(folder, items)

    @property
    def prompts(self) -> list[str | None]:
        """The prompt of each picture, from the metadata or from notes in the file."""
        return [item.prompt for item in self.items]

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Image.Image: ...

    @overload
    def __getitem__(self, index: slice) -> Gallery: ...

    def __getitem__(self, index: int | slice) -> Image.Image | Gallery:
        """A picture; a slice is a smaller gallery."""
        if isinstance(index, slice):
            return Gallery(self.folder, self.items[index])
        item = self.items[index]
        image = open_rgb(item.path)
        return image.crop(item.box) if item.box else image


@dataclass(frozen=True)
class PictureFile:
    """What one file holds."""

    size: tuple[int, int]  # of each picture
    prompt: str | None
    boxes: tuple[tuple[int, int, int, int] | None, ...]  # None: the whole file


def read_picture_file(path: Path) -> PictureFile | str:
    """What a file holds, or why it cannot be read."""
    try:
        with Image.open(path) as file:
            notes = getattr(file, "text", {}) if file.format == "PNG" else {}
            image = ImageOps.exif_transpose(file)
            image.load()
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return str(error).replace(str(path), "").strip(" '") or type(error).__name__
    count = notes.get("images", "1")
    boxes = grid_boxes(image.size, int(count)) if count.isdecimal() and int(count) > 1 else (None,)
    if not boxes:
        return f"no grid of {count} pictures, as its notes say"
    one = boxes[0]
    size = (one[2] - one[0], one[3] - one[1]) if one else image.size
    return PictureFile(size, notes.get("prompt"), boxes)


def open_rgb(path: Path) -> Image.Image:
    """A file's picture as RGB. Raises InputError naming the file."""
    try:
        with Image.open(path) as file:
            return ImageOps.exif_transpose(file).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def grid_boxes(size: tuple[int, int], count: int) -> tuple[tuple[int, int, int, int], ...]:
    """The boxes of `count` pictures in a grid of this size, as `picture.grid` lays them out; () if it is none."""
    columns = squarest(count)
    rows = math.ceil(count / columns)
    (width, right), (height, below) = divmod(size[0] + GAP, columns), divmod(size[1] + GAP, rows)
    if right or below or min(width, height) <= GAP:
        return ()
    corners = [(i % columns * width, i // columns * height) for i in range(count)]
    return tuple((left, top, left + width - GAP, top + height - GAP) for left, top in corners)


def list_pictures(folder: Path) -> list[Path]:
    """Every picture below a folder, by name; without hidden ones."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def read_captions(folder: Path) -> dict[str, str]:
    """file_name -> text of an imagefolder's metadata.jsonl, by name; empty where there is none."""
    path = folder / METADATA
    if not path.is_file():
        return {}
    captions = {}
    for number, line in enumerate(read_text(path, "save it as UTF-8", LINES).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, "it")
            captions[str(row["file_name"])] = str(row.get("text") or "")
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError(f"{path}, line {number}, is no JSON object with a file_name") from None
    return dict(sorted(captions.items()))


def reference_folder(folder: Path) -> Path:
    """The part of a reference that is compared with: val/ of an imagefolder that has one, else all of it."""
    return folder / "val" if (folder / "val").is_dir() else folder


def check_sizes(folder: Path, sizes: dict[str, tuple[int, int]]) -> None:
    """InputError naming the pictures of another size than most."""
    counts: dict[tuple[int, int], int] = {}
    for size in sizes.values():
        counts[size] = counts.get(size, 0) + 1
    usual = max(counts, key=lambda size: counts[size])
    odd = [f"{name} ({w} x {h})" for name, (w, h) in sizes.items() if (w, h) != usual]
    if odd:
        raise InputError(
            f"{folder} mixes sizes, which are measured separately; most pictures are {usual[0]} x {usual[1]}, "
            f"but not {first_names(odd)}"
        )


def first_names(names: Sequence[str]) -> str:
    """At most ten of them, then a count."""
    more = f", and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def square(image: Image.Image, side: int) -> Image.Image:
    """The central square as RGB, `side` pixels wide; resampled with an antialiased bicubic filter.

    Other filters shift feature statistics (arXiv 2104.11222), so every metric comes through here.
    """
    image = image.convert("RGB")
    short = min(image.size)
    left, top = (image.width - short) // 2, (image.height - short) // 2
    box = (left, top, left + short, top + short)
    if short == side:
        return image.crop(box)
    return image.resize((side, side), Image.Resampling.BICUBIC, box)


def squares(images: Sequence[Image.Image], side: int, batch: int) -> Iterator[Tensor]:
    """Central squares in order, at most `batch` at a time: [B, 3, side, side] uint8."""
    for start in range(0, len(images), batch):
        bytes_ = b"".join(
            square(images[i], side).tobytes() for i in range(start, min(start + batch, len(images)))
        )
        flat = torch.frombuffer(bytearray(bytes_), dtype=torch.uint8)
        yield flat.view(-1, side, side, 3).permute(0, 3, 1, 2)
