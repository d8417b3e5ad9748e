"""Training material on disk: numbered safetensors files (shards), of which missing ones are computed.

Each file is replaced as a whole: a killed run loses the shard, or those of a large batch, that it computes, and the next run
computes the missing shards.
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
from lanternpp.nn.files import wrong_file
from lanternpp.training.loop import team
from lanternpp.training.state import Report
from lanternpp.util.files import megabytes, replacing, sweep

SPARE = 1 << 28  # bytes of a disk that stay free
Shard = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors, and facts for the header of the file."""
Done = Callable[[float], None]
"""Called with the number of pictures that are computed, of the shard or the group of shards that is."""


@dataclass(frozen=True)
class Material:
    """A folder of shards of `each` pictures, `count` in all. The folder is named after a key, a hash of all that decides the content.

    compute: called with the parts of missing shards, yields each of them; contents: as messages call it; picture_bytes: of a
    picture on disk, about.
    """

    folder: Path
    count: int
    each: int
    compute: Callable[[Sequence[range], Done], Iterator[Shard]]
    contents: str
    picture_bytes: int

    @property
    def paths(self) -> list[Path]:
        """The files of all shards."""
        return [self.folder / f"{number:05d}.safetensors" for number in range(-(-self.count // self.each))]

    def build(self) -> Material:
        """Itself, after the first process of the team has computed the missing shards. InputError where the disk lacks room."""
        with team().leader_first():
            sweep(self.folder)
            if missing := [number for number, path in enumerate(self.paths) if not path.is_file()]:
                self._fill(missing)
        return self

    def _fill(self, missing: Sequence[int]) -> None:
        parts = [range(n * self.each, min((n + 1) * self.each, self.count)) for n in missing]
        count = sum(map(len, parts))
        size, before, announced = count * self.picture_bytes, 0, False
        check_disk_space(self.folder, size, self.contents)
        report, began = Report("training", self.folder), time.monotonic()

        def done(pictures: float) -> None:
            nonlocal announced
            if not announced:  # so that an error in the first pictures is all that is said
                report.say(f"{self.contents}: {count} pictures, about {megabytes(size)} in {self.folder}")
                announced = True
            now = before + pictures
            report.advance(time.monotonic() - began, now / count, f"{now:.0f}/{count} pictures")

        with report.bar():
            shards = self.compute(parts, done)
            for part, number, (tensors, facts) in zip(parts, missing, shards, strict=True):
                write_file(self.paths[number], tensors, facts)
                before += len(part)

    def read(self) -> Iterator[Shard]:
        """Every shard of the built material. InputError where a file is broken."""
        return map(read_file, self.paths)


def write_file(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write a safetensors file with facts in its header, whole or not at all."""
    on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(on_host, temporary, metadata={"facts": json.dumps(facts)})


def read_file(path: Path, remedy: str = "delete it to make it again") -> Shard:
    """The tensors and the facts of such a file. InputError where the file is broken, which ends with the remedy."""
    with wrong_file(f"{path} cannot be read", remedy), safe_open(path, "pt") as file:
        facts = json.loads((file.metadata() or {}).get("facts", "{}"))
        return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118


def check_disk_space(folder: Path, size: int, what: str) -> None:
    """InputError where the disk of `folder`, which may not exist yet, lacks room for `size` bytes of `what`."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if size + SPARE > free:
        raise InputError(
            f"{what} takes {megabytes(size)} in {folder} and the disk has {megabytes(free)} free: free some, or "
            "leave it out."
        )
