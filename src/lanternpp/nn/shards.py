"""Files of tensors, opened a part at a time so that what has been read does not stay in memory."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.nn.checkpoints import read_pt

SAFE = ".safetensors"
PICKLED = (".pt", ".pth", ".bin", ".ckpt")
INDEX = ".index.json"
INSIDE = ("model", "module", "state_dict", "ema")  # where a training script's checkpoint keeps its weights
NOT_WEIGHTS = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"}
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

Get = Callable[[str], Tensor]


class Shard(ABC):
    """One file of named tensors."""

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise InputError(f"{path} is missing: fetch it again.")

    @abstractmethod
    def metas(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype, on the meta device, in the file's order."""

    @abstractmethod
    def opened(self) -> Any:
        """A context that yields name -> tensor; what it mapped goes away with it."""


class SafeShard(Shard):
    """A safetensors file."""

    def metas(self) -> dict[str, Tensor]:
        """From the header alone."""
        with self._open() as file:
            return {name: self._meta(name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118

    @contextmanager
    def opened(self) -> Iterator[Get]:
        """Tensors over a mapping of the file."""
        with self._open() as file:
            yield file.get_tensor

    def _meta(self, name: str, piece: Any) -> Tensor:
        kind = piece.get_dtype()
        if kind not in DTYPES:
            raise InputError(
                f"{self.path}: {name} is stored as {kind}; convert it to one of {', '.join(DTYPES)}."
            )
        return torch.empty(piece.get_shape(), dtype=DTYPES[kind], device="meta")

    @contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            with safe_open(self.path, framework="pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{self.path} is truncated or no safetensors file ({error}): fetch it again."
            ) from None


class PickledShard(Shard):
    """A torch checkpoint, read with `weights_only`; of nested ones, the dict that holds the weights."""

    def metas(self) -> dict[str, Tensor]:
        """From the pickle; a zipped file's data is not read."""
        return {name: tensor.to("meta") for name, tensor in self._tensors().items()}

    @contextmanager
    def opened(self) -> Iterator[Get]:
        """Tensors over a mapping of the file, or in memory where its format is an old one."""
        yield self._tensors().__getitem__

    def _tensors(self) -> dict[str, Tensor]:
        with self.path.open("rb") as file:
            zipped = file.read(2) == b"PK"
        found = weights_of(read_pt(self.path, mmap=zipped))
        if not found:
            raise InputError(f"{self.path} holds no named tensors, at the top or under {', '.join(INSIDE)}.")
        return found


def weights_of(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """The named tensors of a checkpoint: those at the top, or those under a usual name."""
    for key in INSIDE:
        inner = content.get(key)
        if isinstance(inner, Mapping) and (found := weights_of(inner)):
            return found
    return {str(name): value.detach() for name, value in content.items() if isinstance(value, Tensor)}


def shard(path: Path) -> Shard:
    """A file of tensors by its suffix; InputError for another suffix."""
    if path.suffix == SAFE:
        return SafeShard(path)
    if path.suffix in PICKLED:
        return PickledShard(path)
    raise InputError(f"{path} is no checkpoint: its name should end in {', '.join((SAFE, *PICKLED))}.")


def shards(path: Path) -> list[Shard]:
    """The files of one checkpoint: a file, the shards of an index, or what a folder holds of these."""
    if path.is_file():
        return indexed(path) if path.name.endswith(INDEX) else [shard(path)]
    if not path.is_dir():
        raise InputError(f"{path} is missing: name a checkpoint file, or the folder that holds one.")
    files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
    for suffixes in ((SAFE,), PICKLED):
        held = [p for p in files if p.suffix in suffixes and p.name not in NOT_WEIGHTS]
        index = [p for p in files if p.name.endswith(INDEX) and any(s in p.name for s in suffixes)]
        if index:
            return indexed(only(path, index))
        if any("-of-" in p.name for p in held):
            raise InputError(f"{path} holds shards such as {held[0].name} without their {INDEX[1:]}.")
        if held:
            return [shard(only(path, held))]
    raise InputError(f"{path} holds no checkpoint: no file ends in {', '.join((SAFE, *PICKLED))}.")


def only(folder: Path, files: list[Path]) -> Path:
    """The one file, or the one with the usual name; InputError naming them all where neither exists."""
    usual = [p for p in files if p.name.split(".")[0] in ("model", "pytorch_model")]
    chosen = usual if len(usual) == 1 else files
    if len(chosen) > 1:
        names = ", ".join(p.name for p in files[:10])
        raise InputError(f"{folder} holds {len(files)} checkpoints ({names}): name one of them.")
    return chosen[0]


def indexed(index: Path) -> list[Shard]:
    """The shards that an index lists; InputError where one is missing."""
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(table.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{index} is no index of shards: restore it from its source.") from None
    gone = [name for name in names if not (index.parent / name).is_file()]
    if gone:
        more = f", and {len(gone) - 10} more" if len(gone) > 10 else ""
        raise InputError(
            f"{index} lists shards that are missing: {', '.join(gone[:10])}{more}; fetch them again."
        )
    return [shard(index.parent / name) for name in names]
