"""Pictures in a folder, with their prompts where these are known; each is decoded when it is accessed."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from lanternpp.api.picture import open_image, squarest
from lanternpp.errors import InputError
from lanternpp.nn.files import listed
from lanternpp.util import files
from lanternpp.util.jsonfile import read_lines

SUFFIXES = frozenset((".webp", ".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff"))
METADATA = "metadata.jsonl"
LAYOUT = "write an object with file_name and text on each line, in UTF-8"
GAP = 2  # pixels between the pictures of a grid that `generate` wrote


@dataclass(frozen=True)
class Item:
    """A picture: a file, or a part of one, its prompt, and its size where that is known."""

    path: Path
    prompt: str | None
    box: tuple[int, int, int, int] | None = None  # left, top, right, bottom
    size: tuple[int, int] = (0, 0)


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
            found = {path.relative_to(folder).as_posix(): pool.submit(read_items, path) for path in paths}
        items, faults, sizes = list[Item](), list[str](), dict[str, tuple[int, int]]()
        for name, read in found.items():
            if isinstance(here := read.result(), str):
                faults.append(f"{name} ({here})")
                continue
            items += [replace(item, prompt=captions.get(name) or item.prompt) for item in here]
            sizes[name] = here[0].size
        if faults:
            raise InputError(f"{folder} has pictures that cannot be read: {listed(faults)}")
        if len(items) < least:
            raise InputError(f"{folder} holds {len(items)} pictures; at least {least} are needed")
        usual = Counter(sizes.values()).most_common(1)[0][0]
        if one_size and (odd := [f"{name} ({w} x {h})" for name, (w, h) in sizes.items() if (w, h) != usual]):
            raise InputError(
                f"{folder} mixes sizes, which are measured separately; most pictures are {usual[0]} x {usual[1]}, "
                f"but not {listed(odd)}"
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


def read_items(path: Path) -> list[Item] | str:
    """The pictures in a file, or why it cannot be read."""
    image = open_image(path)
    if isinstance(image, str):
        return image
    count, prompt = str(image.info.get("images", 1)), image.info.get("prompt")
    if not count.isdecimal() or int(count) < 2:
        return [Item(path, prompt, None, image.size)]
    boxes = grid_boxes(image.size, int(count))
    pictures = [Item(path, prompt, box, (box[2] - box[0], box[3] - box[1])) for box in boxes]
    return pictures or f"no grid of {count} pictures, as its notes say"


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
    """file_name, relative to the folder -> text of an imagefolder's metadata.jsonl, by name; empty where there is none."""
    path, captions, root = folder / METADATA, list[tuple[str, str]](), folder.absolute()
    for where, row in read_lines(path, "file_name", LAYOUT) if path.is_file() else ():
        picture = root / row["file_name"]  # it may be an absolute path, or begin with ./
        if not picture.is_relative_to(root):
            raise InputError(f"{where} names {picture}, which is not in {folder}; {LAYOUT}")
        captions.append((picture.relative_to(root).as_posix(), str(row.get("text") or "")))
    return dict(sorted(captions))


def write_captions(folder: Path, captions: Mapping[str, str]) -> None:
    """An imagefolder's metadata.jsonl, of file_name -> text."""
    rows = ({"file_name": name, "text": text} for name, text in captions.items())
    files.write_text(folder / METADATA, "".join(json.dumps(row) + "\n" for row in rows))


def reference_folder(folder: Path) -> Path:
    """The part of a reference that is compared with: val/ of an imagefolder that has one, else all of it."""
    return folder / "val" if (folder / "val").is_dir() else folder


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


def to_pixels(image: Image.Image) -> Tensor:
    """A PIL image as [3, H, W] uint8."""
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1)
