"""Training material on disk: numbered safetensors files (shards). Missing files are computed.

Each file is written whole or not at all: a killed run loses only the shards that it is computing, and the next run computes them.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.nn.checkpoints import write_safetensors
from lanternpp.nn.files import input_errors
from lanternpp.training.loop import team
from lanternpp.training.state import Report
from lanternpp.util.files import megabytes, sweep

REMEDY = "delete it to make it again"
SPARE_BYTES = 1 << 28  # of a disk that stay free
Shard = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors, and facts for the header of the file."""
Done = Callable[[float], None]
"""Called with the number of pictures computed so far, counted from the start of the current shard or group of shards."""
Compute = Callable[[Sequence[range], Done], Iterator[Shard]]
"""Called with the range of pictures of each missing shard; yields these shards in order."""


def build_shards(
    folder: Path, count: int, shard_size: int, compute: Compute, contents: str, picture_bytes: int
) -> list[Path]:
    """Compute the missing shards of `count` pictures in the first process of the team, and return the files of all shards.

    folder: its name has a hash of all that decides the content; shard_size: pictures in a shard; contents: their name in messages;
    picture_bytes: of a picture on disk, about. Raise InputError where the disk lacks room.
    """
    parts = [range(first, min(first + shard_size, count)) for first in range(0, count, shard_size)]
    files = {part: folder / f"{number:05d}.safetensors" for number, part in enumerate(parts)}
    with team().leader_first():
        sweep(folder)
        if missing := {part: path for part, path in files.items() if not path.is_file()}:
            write_shards(missing, compute, contents, sum(map(len, missing)) * picture_bytes)
    return list(files.values())


def write_shards(files: Mapping[range, Path], compute: Compute, contents: str, size: int) -> None:
    """Compute shards of `size` bytes in all and write each to its file, with progress on stderr."""
    folder, count = next(iter(files.values())).parent, sum(map(len, files))
    check_disk_space(folder, size, contents)
    report, started = Report("training", folder), time.monotonic()
    num_written, announced = 0, False

    def done(pictures: float) -> None:
        nonlocal announced
        if not announced:  # only now, so that an error in the first pictures is the only output
            report.say(f"{contents}: {count} pictures, about {megabytes(size)} in {folder}")
            announced = True
        num_done = num_written + pictures
        report.advance(time.monotonic() - started, num_done / count, f"{num_done:.0f}/{count} pictures")

    with report.bar():
        for (part, path), (tensors, facts) in zip(files.items(), compute(list(files), done), strict=True):
            on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            write_safetensors(path, on_host, {"facts": json.dumps(facts)})
            num_written += len(part)


def read_file(path: Path, *names: str, remedy: str = REMEDY) -> Shard:
    """Read the tensors and facts of a shard; raise InputError, which ends with the remedy, where it is broken or lacks one of the names."""
    with input_errors(f"{path} cannot be read", remedy), safe_open(path, "pt") as file:
        facts = json.loads((file.metadata() or {}).get("facts", "{}"))
        if missing := set(names).difference(file.keys(), facts):
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
        return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118


def check_disk_space(folder: Path, size: int, contents: str) -> None:
    """Check that the disk of `folder`, which may not exist yet, has room for `size` bytes of `contents`; raise InputError if not."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if size + SPARE_BYTES > free:
        raise InputError(
            f"{contents} takes {megabytes(size)} in {folder} and the disk has {megabytes(free)} free, of which "
            f"{megabytes(SPARE_BYTES)} stay free: free some, or leave it out."
        )
