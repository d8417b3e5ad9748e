"""Training material on disk: numbered safetensors files (shards), of which missing ones are computed.

Each file is replaced as a whole: a killed run loses the shard, or those of a large batch, that it computes, and the next run
computes the missing shards.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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

REMEDY = "delete it to make it again"
SPARE = 1 << 28  # bytes of a disk that stay free
Shard = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors, and facts for the header of the file."""
Done = Callable[[float], None]
"""Called with the number of pictures that are computed, of the shard or the group of shards that is."""
Compute = Callable[[Sequence[range], Done], Iterator[Shard]]
"""Called with the pictures of the missing shards, yields each shard."""


def build_shards(
    folder: Path, count: int, each: int, compute: Compute, contents: str, picture_bytes: int
) -> list[Path]:
    """The files of all shards of `count` pictures, `each` in a shard, after the first process of the team has computed the missing ones.

    folder: named after a key, a hash of all that decides the content; contents: as messages call it; picture_bytes: of a
    picture on disk, about. InputError where the disk lacks room.
    """
    parts = [range(first, min(first + each, count)) for first in range(0, count, each)]
    files = {part: folder / f"{number:05d}.safetensors" for number, part in enumerate(parts)}
    with team().leader_first():
        sweep(folder)
        if missing := {part: path for part, path in files.items() if not path.is_file()}:
            fill(missing, compute, contents, sum(map(len, missing)) * picture_bytes)
    return list(files.values())


def fill(files: Mapping[range, Path], compute: Compute, contents: str, size: int) -> None:
    """Compute shards of `size` bytes in all and write each to its file, with their progress on stderr."""
    folder, count, before, announced = next(iter(files.values())).parent, sum(map(len, files)), 0, False
    check_disk_space(folder, size, contents)
    report, began = Report("training", folder), time.monotonic()

    def done(pictures: float) -> None:
        nonlocal announced
        if not announced:  # so that an error in the first pictures is all that is said
            report.say(f"{contents}: {count} pictures, about {megabytes(size)} in {folder}")
            announced = True
        now = before + pictures
        report.advance(time.monotonic() - began, now / count, f"{now:.0f}/{count} pictures")

    with report.bar():
        for (part, path), shard in zip(files.items(), compute(list(files), done), strict=True):
            write_file(path, *shard)
            before += len(part)


def write_file(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write a safetensors file with facts in its header, whole or not at all."""
    on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(on_host, temporary, metadata={"facts": json.dumps(facts)})


def read_file(path: Path, *names: str, remedy: str = REMEDY) -> Shard:
    """The tensors and the facts of such a file. InputError, which ends with the remedy, where it is broken, or lacks one of these names."""
    with wrong_file(f"{path} cannot be read", remedy), safe_open(path, "pt") as file:
        facts = json.loads((file.metadata() or {}).get("facts", "{}"))
        if lacking := set(names).difference(file.keys(), facts):
            raise ValueError(f"it has no {', '.join(sorted(lacking))}")
        return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118


def check_disk_space(folder: Path, size: int, what: str) -> None:
    """InputError where the disk of `folder`, which may not exist yet, lacks room for `size` bytes of `what`."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if size + SPARE > free:
        raise InputError(
            f"{what} takes {megabytes(size)} in {folder} and the disk has {megabytes(free)} free, of which "
            f"{megabytes(SPARE)} stay free: free some, or leave it out."
        )
