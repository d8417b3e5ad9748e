"""Pictures in a folder, with their prompts where these are known; a picture is decoded on access."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lanternpp.api.picture import open_image, squarest
from lanternpp.errors import InputError, counted
from lanternpp.nn.files import join_names
from lanternpp.util import files
from lanternpp.util.jsonfile import read_lines

SUFFIXES = frozenset((".webp", ".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff"))
METADATA = "metadata.jsonl"
LAYOUT = "write an object with file_name and text on each line, in UTF-8"
GAP = 2  # pixels between the pictures of a grid that `generate` wrote
Box = tuple[int, int, int, int]  # left, top, right, bottom


@dataclass(frozen=True)
class Item:
    """A picture: a file, or a box of a file, its prompt, and its size."""

    path: Path
    prompt: str | None
    box: Box | None = None
    size: tuple[int, int] = (0, 0)  # (0, 0): not known


class Gallery(Sequence[Image.Image]):
    """The pictures of a folder, in the order of their names."""

    def __init__(self, folder: Path, items: Sequence[Item]):
        self.folder, self.items = folder, tuple(items)

    @classmethod
    def read(cls, folder: Path, min_pictures: int = 1, one_size: bool = False) -> Gallery:
        """Read every picture below `folder`, or the pictures that its metadata.jsonl names.

        Every file is decoded once as a check. A grid that `generate` wrote counts as the pictures in the grid. Raise InputError
        for fewer than `min_pictures`, for a picture that cannot be read, and, with one_size, for pictures of different sizes.
        """
        if not folder.is_dir():
            raise InputError(f"{folder} is no folder; name one that holds pictures")
        captions = read_captions(folder)
        paths = [folder / name for name in captions] if captions else list_pictures(folder)
        names = [path.relative_to(folder).as_posix() for path in paths]
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            contents = list(pool.map(read_items, paths, map(captions.get, names)))
        pairs = zip(names, contents, strict=True)
        if faults := [f"{name} ({content})" for name, content in pairs if isinstance(content, str)]:
            raise InputError(f"{folder} has pictures that cannot be read: {join_names(faults)}")
        items = [item for content in contents for item in content if isinstance(item, Item)]
        if len(items) < min_pictures:
            raise InputError(
                f"{folder} holds {counted(len(items), 'picture')}; at least {min_pictures} are needed"
            )
        sizes = {item.path.relative_to(folder).as_posix(): item.size for item in items}
        (width, height), _ = Counter(sizes.values()).most_common(1)[0]
        different = [f"{name} ({w} x {h})" for name, (w, h) in sizes.items() if (w, h) != (width, height)]
        if one_size and different:
            raise InputError(
                f"{folder} mixes sizes, which are measured separately; most pictures are {width} x {height}, "
                f"but not {join_names(different)}"
            )
        return cls(folder, items)

    @property
    def prompts(self) -> list[str | None]:
        """The prompt of each picture, from the metadata or from notes in the file."""
        return [item.prompt for item in self.items]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Image.Image:  # type: ignore[override]
        """The picture at an index; slices are not supported."""
        item = self.items[index]
        image = open_image(item.path)
        if isinstance(image, str):
            raise InputError(f"{item.path} cannot be read: {image}")
        return image.crop(item.box) if item.box else image


def read_items(path: Path, caption: str | None) -> list[Item] | str:
    """Return the pictures in a file, or the reason why the file cannot be read. caption: None: the prompt is in the file's notes."""
    image = open_image(path)
    if isinstance(image, str):
        return image
    count, prompt = str(image.info.get("images", 1)), caption or image.info.get("prompt")
    if not count.isdecimal() or int(count) < 2:
        return [Item(path, prompt, None, image.size)]
    boxes = grid_boxes(image.size, int(count))
    pictures = [Item(path, prompt, box, (box[2] - box[0], box[3] - box[1])) for box in boxes]
    return pictures or f"no grid of {count} pictures, as its notes say"


def grid_boxes(size: tuple[int, int], count: int) -> tuple[Box, ...]:
    """Return the boxes of `count` pictures in an image of this size, as `picture.grid` lays them out; () if the image is no such grid."""
    columns = squarest(count)
    rows = math.ceil(count / columns)
    width, width_rest = divmod(size[0] + GAP, columns)
    height, height_rest = divmod(size[1] + GAP, rows)
    if width_rest or height_rest or min(width, height) <= GAP:
        return ()
    corners = [(i % columns * width, i // columns * height) for i in range(count)]
    return tuple((left, top, left + width - GAP, top + height - GAP) for left, top in corners)


def list_pictures(folder: Path) -> list[Path]:
    """Return every picture below a folder, by name, without the hidden files."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def read_captions(folder: Path) -> dict[str, str]:
    """Return file_name, relative to the folder, -> text of an imagefolder's metadata.jsonl, by name; {} without this file."""
    path, root, captions = folder / METADATA, folder.absolute(), list[tuple[str, str]]()
    for line, row in read_lines(path, "file_name", LAYOUT) if path.is_file() else ():
        picture = root / row["file_name"]  # file_name may be an absolute path, or begin with ./
        if not picture.is_relative_to(root):
            raise InputError(f"{line} names {picture}, which is not in {folder}; {LAYOUT}")
        captions.append((picture.relative_to(root).as_posix(), str(row.get("text") or "")))
    return dict(sorted(captions))


def write_captions(folder: Path, captions: Mapping[str, str]) -> None:
    """Write file_name -> text as an imagefolder's metadata.jsonl."""
    rows = ({"file_name": name, "text": text} for name, text in captions.items())
    files.write_text(folder / METADATA, "".join(json.dumps(row) + "\n" for row in rows))


def reference_folder(folder: Path) -> Path:
    """Return the folder of a reference's pictures: its val/, or the folder itself if it has no val/."""
    return folder / "val" if (folder / "val").is_dir() else folder


def square(image: Image.Image, side: int) -> Image.Image:
    """Return the central square as RGB, `side` pixels wide, resampled with an antialiased bicubic filter.

    Other filters shift feature statistics (arXiv 2104.11222), so every metric uses this function.
    """
    image = image.convert("RGB")
    short = min(image.size)
    left, top = (image.width - short) // 2, (image.height - short) // 2
    box = (left, top, left + short, top + short)
    if short == side:
        return image.crop(box)
    return image.resize((side, side), Image.Resampling.BICUBIC, box)


def to_pixels(image: Image.Image) -> Tensor:
    """Convert a PIL image to [3, H, W] uint8."""
    return torch.tensor(np.asarray(image)).permute(2, 0, 1)
