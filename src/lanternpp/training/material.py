"""Training material on disk: numbered safetensors files (shards), of which missing ones are computed.

Each file is written whole, so a killed run loses one shard at most, and the next run computes what is missing.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.training.loop import team
from lanternpp.training.state import Report
from lanternpp.util.files import replacing, sweep

SPARE = 1 << 28  # bytes of a disk that stay free
Tensors = dict[str, Tensor]
Facts = dict[str, Any]
Shard = tuple[Tensors, Facts]
Done = Callable[[float], None]
"""Called with the number of items of the present shard that are computed."""


def parts_of(count: int, size: int) -> list[range]:
    """So many items in consecutive parts of at most `size`."""
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


@dataclass(frozen=True)
class Material:
    """A folder of shards, one for each part of some items. The folder is named after a key, a hash of all that decides
    the content.

    compute: called with the parts of missing shards, yields each of them; title: of the progress bar; unit: what the bar
    counts; contents: as the error about a full disk calls it; item_bytes: of an item on disk, about.
    """

    folder: Path
    parts: Sequence[range]
    compute: Callable[[Sequence[range], Done], Iterator[Shard]]
    title: str
    contents: str
    item_bytes: int
    unit: str = "pictures"

    def path(self, number: int) -> Path:
        """The file of a shard."""
        return self.folder / f"{number:05d}.safetensors"

    def build(self) -> Material:
        """Itself, after the first process of the team has computed the missing shards. InputError where the disk lacks room."""
        with team().leader_first():
            sweep(self.folder)
            missing = [number for number in range(len(self.parts)) if not self.path(number).is_file()]
            if missing:
                self._fill(missing)
        return self

    def _fill(self, missing: Sequence[int]) -> None:
        parts = [self.parts[number] for number in missing]
        count = sum(map(len, parts))
        check_disk_space(self.folder, count * self.item_bytes, self.contents)
        report, began, before = Report(self.title, self.folder), time.monotonic(), 0
        room, announced = in_bytes(count * self.item_bytes), False

        def done(items: float) -> None:
            nonlocal announced
            if not announced:  # so that an error in the first items is all that is said
                report.say(f"{self.contents}: {count} {self.unit}, about {room} in {self.folder}")
                announced = True
            now = before + items
            report.advance(time.monotonic() - began, now / count, f"{now:.0f}/{count} {self.unit}")

        with report.bar():
            for (tensors, facts), number in zip(self.compute(parts, done), missing, strict=True):
                write_file(self.path(number), tensors, facts)
                before += len(self.parts[number])

    def read(self) -> Iterator[Shard]:
        """Every shard of the built material. InputError where a file is broken."""
        return (read_file(self.path(number)) for number in range(len(self.parts)))


def write_file(path: Path, tensors: Tensors, facts: Facts) -> None:
    """Write a safetensors file with facts in its header, whole or not at all."""
    on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(on_host, temporary, metadata={"facts": json.dumps(facts)})


def read_file(path: Path) -> Shard:
    """The tensors and the facts of such a file. InputError where the file is broken."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("facts", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118
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
