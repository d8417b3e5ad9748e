"""What is made once and kept: numbered safetensors files, each written whole, so that a kill costs one of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.nn.checkpoints import replacing, sweep

SPARE = 1 << 28  # bytes of a disk that a cache leaves free


class Shards:
    """A folder of `count` shards."""

    def __init__(self, folder: Path, count: int):
        self.folder, self.count = folder, count
        sweep(folder)

    def path(self, number: int) -> Path:
        """The file of a shard."""
        return self.folder / f"{number:05d}.safetensors"

    @property
    def missing(self) -> list[int]:
        """The shards that are still to be made."""
        return [number for number in range(self.count) if not self.path(number).is_file()]

    def write(self, number: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """A shard, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.path(number)) as temporary:
            save_file(
                {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
                temporary,
                metadata={"facts": json.dumps(dict(facts))},
            )

    def read(self, number: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and the facts of a shard; InputError where its file is broken."""
        path = self.path(number)
        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads(file.metadata()["facts"])
                return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118
        except Exception as error:  # whatever is wrong with a cache, the cure is the same
            raise InputError(f"{path} cannot be read ({error}): delete it to make it again.") from None


def check_room(folder: Path, size: int, what: str) -> None:
    """InputError where the disk of `folder`, which may not exist yet, lacks room for `size` bytes of `what`."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if size + SPARE > free:
        raise InputError(
            f"{what} takes {in_bytes(size)} in {folder} and the disk has {in_bytes(free)} free: free some, or "
            "leave it out."
        )


def in_bytes(size: float) -> str:
    """A size as a reader takes it in."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
