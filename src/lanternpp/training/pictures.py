"""Captioned pictures in a folder: the rows of its metadata, square crops of its files, and their codes."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.evaluation.pictures import LAYOUT, METADATA, list_pictures, open_image, to_pixels
from lanternpp.models.vq.codes import Reader, storage_dtype
from lanternpp.nn.files import join_names
from lanternpp.training.codes import Codes, Done, Shard, Split, build_shards, generator, read_file
from lanternpp.util.files import digest
from lanternpp.util.jsonfile import read_lines

SHARD_SIZE, BATCH_SIZE = 128, 32  # encoded pictures in a shard, and pictures encoded at once
HASHED_BYTES = 1 << 16  # of a picture, which tell pictures of the same size apart
MAX_BAD_SHARE = 0.01  # of unreadable pictures, above which a folder is rejected
MARGIN = 1.125  # short side of pictures in memory, in training sizes
MAX_ASPECT = 4 / 3  # long side of pictures in memory, in short sides


class DataWarning(UserWarning):
    """Warns that a part of the data is left out."""


@dataclass(frozen=True)
class Rows:
    """The entries of a split's metadata: files with captions and labels, sorted by file name."""

    root: Path
    files: tuple[str, ...]
    texts: tuple[str, ...]
    labels: tuple[str, ...]  # "" where a line has none
    bad: dict[str, str] = field(default_factory=dict)  # why a file cannot be read, of all decoded so far

    @property
    def key(self) -> str:
        """A hash of the file list, captions, sizes and the first bytes of every file."""
        parts = [*self.files, *self.texts]
        for path in (self.root / name for name in self.files):
            with suppress(OSError), path.open("rb") as file:
                parts += [str(path.stat().st_size), sha256(file.read(HASHED_BYTES)).hexdigest()]
        return digest(parts)

    def decode(self, part: range, size: int) -> dict[int, Image.Image]:
        """Return the readable pictures of a part by index, as `shrunk` returns them; add the unreadable ones to `bad`, as `leave_out`."""
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
            results = pool.map(lambda i: shrunk(open_image(self.root / self.files[i]), size), part)
        images = dict(zip(part, results, strict=True))
        self.leave_out({self.files[i]: reason for i, reason in images.items() if isinstance(reason, str)})
        return {i: image for i, image in images.items() if not isinstance(image, str)}

    def leave_out(self, bad: Mapping[str, str]) -> None:
        """Add files, and why they cannot be read, to `bad`; raise InputError where they are too many."""
        self.bad.update(bad)
        if len(self.bad) > MAX_BAD_SHARE * len(self.files):
            raise InputError(
                f"{len(self.bad)} of {len(self.files)} pictures in {self.root} are unreadable, e.g. {self._faults()}: "
                "repair them or take their lines out of metadata.jsonl."
            )

    def warn(self) -> None:
        """Warn of the pictures that are left out, if any."""
        if self.bad:
            text = f"{len(self.bad)} of {len(self.files)} pictures skipped in {self.root}: {self._faults()}"
            warnings.warn(text, DataWarning, stacklevel=3)

    def _faults(self) -> str:
        return join_names([f"{name} ({reason})" for name, reason in self.bad.items()])


def read_rows(data: str | Path, split: str, limit: int | None = None) -> Rows:
    """Read the rows of `data/split/metadata.jsonl`, or the rows under `split/` of `data/metadata.jsonl`; the first `limit` of them.

    Raise InputError, which names the line, where a line has no file name or no text.
    """
    data = Path(data)
    root, metadata = data / split, data / split / METADATA
    if not root.is_dir():
        raise InputError(f"{root} is no folder: --data takes an imagefolder with train/ and val/.")
    listing = metadata if metadata.is_file() else data / METADATA
    if not listing.is_file():
        raise InputError(f"{metadata} is missing: it has a line with file_name and text for each picture.")
    rows, num_repeated = dict[str, tuple[str, str, str]](), 0
    for line, row in read_lines(listing, "file_name", LAYOUT):
        path, text = listing.parent.absolute() / row["file_name"], row.get("text")
        if not isinstance(text, str):
            raise InputError(f"{line} has no text: file_name and text are needed.")
        if listing == metadata or path.is_relative_to(root.absolute()):
            name = os.path.relpath(path, root)  # a row may have an absolute path, or begin with ./
            num_repeated += name in rows
            rows[name] = (name, text, str(row.get("label") or ""))
    if num_repeated:
        message = f"{num_repeated} lines of {listing} name a picture again: of its captions the last one alone is used"
        warnings.warn(message, DataWarning, stacklevel=1)
    if not rows:
        pictures = len(list_pictures(root))
        raise InputError(f"{root} has no captions: its metadata.jsonl names none of the {pictures} pictures.")
    files, texts, labels = zip(*[row for _, row in sorted(rows.items())][:limit], strict=True)
    return Rows(root, files, texts, labels)


def shrunk(image: Image.Image | str, size: int) -> Image.Image | str:
    """Return the middle of a picture, resized to MARGIN x `size` pixels on its short side; a text, an error, is returned unchanged."""
    if isinstance(image, str):
        return image
    short, long = math.ceil(size * MARGIN), math.ceil(size * MARGIN * MAX_ASPECT)
    scale = short / min(image.size)
    if scale != 1:
        shape = (max(round(image.width * scale), short), max(round(image.height * scale), short))
        image = image.resize(shape, Image.Resampling.LANCZOS)
    left, top = max(image.width - long, 0) // 2, max(image.height - long, 0) // 2
    return image.crop((left, top, left + min(image.width, long), top + min(image.height, long)))


def crop(image: Image.Image, size: int, across: float, down: float, zoom: float, mirror: bool) -> Tensor:
    """Return a square of a PIL image as [3, size, size] in [-1, 1].

    across, down: the square's position, 0..1; zoom: the square's side, from `size` pixels at 0 to the image's short side at 1.
    """
    short = min(image.size)
    side = min(short, size) + zoom * (short - min(short, size))
    left, top = across * (image.width - side), down * (image.height - side)
    image = image.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
    return to_pixels(ImageOps.mirror(image) if mirror else image) / 127.5 - 1


class PictureCodes:
    """The codes that a reader encodes from the pictures of an imagefolder, training pictures in 2 x crops variants.

    A variant is a crop, mirrored or not; the first crop is the centre.
    """

    def __init__(self, data: Path, reader: Reader, store: Path, crops: int = 2, limit: int | None = None):
        self.data, self.reader, self.store, self.crops = data, reader, store, crops
        self.rows = {split: read_rows(data, split, limit) for split in ("train", "val")}
        self.key = digest([*reader.key, *(rows.key for rows in self.rows.values()), str(crops)])

    def build(self) -> Codes:
        """Return the codes in `store`, where missing ones are encoded now; leave out unreadable pictures with a warning (`Rows.leave_out`)."""
        splits, skipped = dict[str, Split](), list[str]()
        for split, rows in self.rows.items():
            variants = 2 * self.crops if split == "train" else 1
            folder, contents = self.store / f"{split}-{self.key}", f"codes of the {split} pictures"
            encode = partial(self._encode, rows, variants)
            paths = build_shards(folder, len(rows.files), SHARD_SIZE, encode, contents)
            shards = [read_file(path, "codes", "texts", "skipped") for path in paths]
            rows.leave_out(dict(pair for _, facts in shards for pair in facts["skipped"]))
            splits[split] = Split.of(shards)
            skipped += rows.bad
            rows.warn()
        facts = {"folder": self.data.resolve().name, "skipped": skipped[:20], "crops": self.crops}
        return Codes(**splits, key=self.key, facts=facts)

    def _encode(self, rows: Rows, variants: int, parts: Sequence[range], done: Done) -> Iterator[Shard]:
        """Encode the pictures `parts` of a split, a shard for each part."""
        reader, num_done = self.reader, 0
        for part in parts:
            images = rows.decode(part, reader.size)
            shape = len(images), variants, reader.length, *reader.item_shape
            codes = torch.empty(shape, dtype=storage_dtype(reader.codes))
            for variant in range(variants):
                crops = self._crops(list(images.values()), variant, part.start)
                for first in range(0, len(crops), BATCH_SIZE):
                    batch = torch.stack(crops[first : first + BATCH_SIZE]).to(reader.device)
                    codes[first : first + BATCH_SIZE, variant] = reader.encode(batch)
                done(num_done + len(part) * (variant + 1) / variants)
            num_done += len(part)
            names = rows.files[part.start : part.stop]
            skipped = [(name, rows.bad[name]) for name in names if name in rows.bad]
            facts = {"labels": [rows.labels[i] for i in images], "texts": [rows.texts[i] for i in images]}
            yield {"codes": codes}, {**facts, "skipped": skipped}

    def _crops(self, images: Sequence[Any], variant: int, first: int) -> list[Tensor]:
        """Return a variant of the images of a shard, whose first picture has the index `first`."""
        number, mirror = divmod(variant, 2)
        crops = torch.rand(len(images), 3, generator=generator(number, first))  # across, down and zoom
        if number == 0:
            crops = torch.tensor([0.5, 0.5, 1.0]).expand(len(images), 3)
        return [
            crop(image, self.reader.size, across, down, zoom, bool(mirror))
            for image, (across, down, zoom) in zip(images, crops.tolist(), strict=True)
        ]
