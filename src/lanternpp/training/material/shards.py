"""Training material on disk: numbered safetensors files (shards), and the one loop that computes missing ones.

Each file is written whole, so a killed run loses one shard at most, and the next run computes what is missing.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.training.report import Report
from lanternpp.training.team import team
from lanternpp.util.files import replacing, sweep

SPARE = 1 << 28  # bytes of a disk that a cache leaves free
T = TypeVar("T")
Tensors = dict[str, Tensor]
Facts = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """The items of one shard, consecutive ones; of pictures, those of a split and perhaps in one of their variants."""

    start: int
    stop: int
    split: str = ""
    variant: int | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def within(self, whole: Tensor) -> Tensor:
        """Its part of a tensor of the whole split, [M, variants, ...], or [M, ...] without variants."""
        rows = whole[self.start : self.stop]
        return rows if self.variant is None else rows[:, self.variant]


def parts_of(count: int, size: int, split: str = "", variant: int | None = None) -> list[Part]:
    """So many items, at most `size` in a shard."""
    return [Part(first, min(first + size, count), split, variant) for first in range(0, count, size)]


class Shards:
    """A folder with a shard for every part; `build` computes those that are missing.

    title: of the progress bar; contents: as the error about a full disk calls them; item_bytes: of an item on disk;
    unit: what the progress bar counts.
    """

    def __init__(
        self,
        folder: Path,
        parts: Sequence[Part],
        title: str,
        contents: str,
        item_bytes: int,
        unit: str = "pictures",
    ):
        self.folder, self.parts, self.unit = folder, parts, unit
        self.contents, self.item_bytes = contents, item_bytes
        self.number, self.done, self.began = 0, 0, 0.0
        self.report = Report(title, folder)
        sweep(folder)

    def path(self, number: int) -> Path:
        """The file of a shard."""
        return self.folder / f"{number:05d}.safetensors"

    def read(self) -> Iterator[tuple[Tensors, Facts]]:
        """The tensors and the facts of every shard; InputError where a file is broken."""
        for number in range(len(self.parts)):
            yield read_file(self.path(number), lambda tensors, facts: (tensors, facts))

    def build(self, compute: Callable[[], None]) -> Shards:
        """These shards, after one process of several has computed the missing ones: see `fill`."""
        with team().leader_first():
            self.fill(compute)
        return self

    def fill(self, compute: Callable[[], None]) -> None:
        """Where shards are missing call `compute`, which loops over `pending` and calls `write` for each.

        `count` items are missing, which take `room`. InputError where the disk has not so much.
        """
        self.missing = [number for number in range(len(self.parts)) if not self.path(number).is_file()]
        self.count = sum(len(self.parts[number]) for number in self.missing)
        size = self.count * self.item_bytes
        self.room = f"{in_bytes(size)} in {self.folder}"
        if self.missing:
            check_disk_space(self.folder, size, self.contents)
            compute()

    def pending(self, line: str) -> Iterator[Part]:
        """The parts that are missing, under a progress bar; `line` says what is computed."""
        self.report.say(line)
        self.began = time.monotonic()
        with self.report.bar(0.0):
            for number in self.missing:
                self.number = number
                yield self.parts[number]
                self.done += len(self.parts[number])

    def batches(self, size: int) -> Iterator[Tensor]:
        """The items [n] of the present part, at most `size` at a time."""
        part = self.parts[self.number]
        for index in torch.arange(part.start, part.stop).split(size):
            yield index
            self.progress(int(index[-1]) + 1 - part.start)

    def progress(self, count: float) -> None:
        """So many items of the present part are computed."""
        share = (self.done + count) / self.count
        line = f"{self.done + count:.0f}/{self.count} {self.unit}"
        self.report.advance(time.monotonic() - self.began, share, line)

    def write(self, tensors: Tensors, facts: Facts | None = None) -> None:
        """Write the shard of the present part."""
        write_file(self.path(self.number), tensors, facts or {})


def file_of(path: Path, write: Callable[[], None], parse: Callable[[Tensors, Facts], T]) -> T:
    """What `parse` returns for a file; if the file is missing, one process of the team calls `write` first."""
    with team().leader_first():
        if not path.is_file():
            write()
    return read_file(path, parse)


def join(
    path: Path, shards: Shards, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, facts: Facts
) -> None:
    """Write a file with a tensor of a shape for each split, out of shards of one tensor, which are then removed."""
    sweep(path.parent)
    tensors = {split: torch.empty(shape, dtype=dtype) for split, shape in shapes.items()}
    for part, (found, _) in zip(shards.parts, shards.read(), strict=True):
        (tensor,) = found.values()
        part.within(tensors[part.split]).copy_(tensor)
    write_file(path, tensors, facts)
    shutil.rmtree(shards.folder)


def write_file(path: Path, tensors: Tensors, facts: Facts) -> None:
    """Write a safetensors file with facts in its header, whole or not at all."""
    whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(whole, temporary, metadata={"facts": json.dumps(facts)})


def read_file(path: Path, parse: Callable[[Tensors, Facts], T]) -> T:
    """What `parse` makes of the tensors and the facts of such a file; InputError where it is broken."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("facts", "{}"))
            return parse({name: file.get_tensor(name) for name in file.keys()}, facts)  # noqa: SIM118
    except Exception as error:  # whatever is wrong with a cached file, the remedy is the same
        raise InputError(f"{path} cannot be read ({error}): delete it to make it again.") from None


def check_disk_space(folder: Path, size: int, what: str) -> None:
    """InputError where the disk of `folder`, which may not exist yet, lacks room for `size` bytes of `what`."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if size + SPARE > free:
        raise InputError(
            f"{what} takes {in_bytes(size)} in {folder} and the disk has {in_bytes(free)} free: free some, or "
            "leave it out."
        )


def in_bytes(size: float) -> str:
    """A number of bytes as text, in B, KiB, MiB or GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
