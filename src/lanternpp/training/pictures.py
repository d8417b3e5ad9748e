"""Captioned pictures in a folder: the rows of its metadata, and square crops of its files."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from PIL import Image, ImageOps
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.evaluation.pictures import LAYOUT, METADATA, list_pictures, open_image, to_pixels
from lanternpp.nn.files import listed
from lanternpp.util.files import digest
from lanternpp.util.jsonfile import read_lines

HASHED = 1 << 16  # bytes of a picture, by which another of its size is told
CORRUPT = 0.01  # share of unreadable pictures above which a folder is rejected
MARGIN = 1.125  # pictures are kept with this much of the training size on their short side
STRETCH = 4 / 3  # and at most this much longer than wide


class DataWarning(UserWarning):
    """A part of the data that is left out."""


@dataclass(frozen=True)
class Rows:
    """The entries of a split's metadata: files with captions and labels, sorted by file name."""

    root: Path
    files: tuple[str, ...]
    texts: tuple[str, ...]
    labels: tuple[str, ...]  # "" where a line has none
    bad: dict[str, str] = field(default_factory=dict)  # why files cannot be read, of those decoded so far

    @property
    def key(self) -> str:
        """A hash of the file list, captions, sizes and the first bytes of every file."""
        parts = [*self.files, *self.texts]
        for path in (self.root / name for name in self.files):
            with suppress(OSError), path.open("rb") as file:
                parts += [str(path.stat().st_size), sha256(file.read(HASHED)).hexdigest()]
        return digest(parts)

    def decode(self, part: range, size: int) -> dict[int, Image.Image]:
        """Pictures of a part by index, as `shrunk` gives them; others go into `bad`. InputError where those are too many."""
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
            found = pool.map(lambda i: shrunk(open_image(self.root / self.files[i]), size), part)
        images = dict(zip(part, found, strict=True))
        self.leave_out({self.files[i]: why for i, why in images.items() if isinstance(why, str)})
        return {i: image for i, image in images.items() if not isinstance(image, str)}

    def leave_out(self, bad: Mapping[str, str]) -> None:
        """Add to `bad` why files cannot be read. InputError where those are too many."""
        self.bad.update(bad)
        if len(self.bad) > CORRUPT * len(self.files):
            raise InputError(
                f"{len(self.bad)} of {len(self.files)} pictures in {self.root} are unreadable, e.g. {self._faults()}: "
                "repair them or take their lines out of metadata.jsonl."
            )

    def warn(self) -> None:
        """Name the pictures that are left out, if there are any."""
        if self.bad:
            said = f"{len(self.bad)} of {len(self.files)} pictures skipped in {self.root}: {self._faults()}"
            warnings.warn(said, DataWarning, stacklevel=3)

    def _faults(self) -> str:
        return listed([f"{name} ({why})" for name, why in self.bad.items()])


def read_rows(data: str | Path, split: str, limit: int | None = None) -> Rows:
    """The rows of `data/split/metadata.jsonl`, or those of `data/metadata.jsonl` that lie under `split/`; the first `limit`.

    InputError names a line without a file name or a text.
    """
    data = Path(data)
    if not data.is_dir():
        raise InputError(f"{data} is no folder: --data takes an imagefolder with train/ and val/.")
    root = data / split
    if not root.is_dir():
        raise InputError(f"{root} is missing: an imagefolder for training has train/ and val/.")
    own = root / METADATA
    listing = own if own.is_file() else data / METADATA
    if not listing.is_file():
        raise InputError(f"{own} is missing: it has a line with file_name and text for each picture.")
    rows, again = dict[str, tuple[str, str, str]](), 0
    for line, row in read_lines(listing, "file_name", LAYOUT):
        path, text = listing.parent.absolute() / row["file_name"], row.get("text")
        if not isinstance(text, str):
            raise InputError(f"{line} has no text: file_name and text are needed.")
        if listing == own or path.is_relative_to(root.absolute()):
            name = os.path.relpath(path, root)  # it may have been an absolute path, or begin with ./
            again += name in rows
            rows[name] = (name, text, str(row.get("label") or ""))
    if again:
        said = f"{again} lines of {listing} name a picture again: of its captions the last one alone is used"
        warnings.warn(said, DataWarning, stacklevel=1)
    if not rows:
        pictures = len(list_pictures(root))
        raise InputError(f"{root} has no captions: its metadata.jsonl names none of the {pictures} pictures.")
    files, texts, labels = zip(*[row for _, row in sorted(rows.items())][:limit], strict=True)
    return Rows(root, files, texts, labels)


def shrunk(image: Image.Image | str, size: int) -> Image.Image | str:
    """A picture somewhat larger than `size` on its short side and not very long; a text, why there is none, stays as it is."""
    if isinstance(image, str):
        return image
    short, long = math.ceil(size * MARGIN), math.ceil(size * MARGIN * STRETCH)
    scale = short / min(image.size)
    if scale != 1:
        shape = (max(round(image.width * scale), short), max(round(image.height * scale), short))
        image = image.resize(shape, Image.Resampling.LANCZOS)
    left, top = max(image.width - long, 0) // 2, max(image.height - long, 0) // 2
    return image.crop((left, top, left + min(image.width, long), top + min(image.height, long)))


def crop(image: Image.Image, size: int, across: float, down: float, zoom: float, mirror: bool) -> Tensor:
    """A square of a PIL image as [3, size, size] in [-1, 1].

    across, down: where, 0..1; zoom: 0 is a square of `size` pixels, 1 one of the whole short side.
    """
    short = min(image.size)
    side = min(short, size) + zoom * (short - min(short, size))
    left, top = across * (image.width - side), down * (image.height - side)
    image = image.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
    return to_pixels(ImageOps.mirror(image) if mirror else image) / 127.5 - 1
