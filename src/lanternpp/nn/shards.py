"""Files of tensors, opened a part at a time so that what has been read does not stay in memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.nn.pickled import is_zipped, read_pt
from lanternpp.nn.stores import SCALE, restored, scaled, unpack_int6
from lanternpp.util.jsonfile import read_json

SAFE = ".safetensors"
PICKLED = (".pt", ".pth", ".bin", ".ckpt")
INDEX = ".index.json"
MOST, LONGEST = 100_000, 500  # tensors of a file, characters of a tensor's name
DEEPEST = 4  # dicts in each other around the weights of a training script's checkpoint
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

SPREAD = 1 << 24  # bytes of a tensor that may repeat fewer bytes of its file

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

    def metas(self, any_names: bool = False) -> dict[str, Tensor]:
        """From the header alone. any_names: those of no model, too many or too long, are taken as well."""
        with self._open() as file:
            names = list(file.keys())
            if not any_names:
                check_names(names, self.path)
            return {name: self._meta(name, file.get_slice(name)) for name in names}

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
        try:
            return torch.empty(piece.get_shape(), dtype=DTYPES[kind], device="meta")
        except (RuntimeError, TypeError):  # dimensions that no tensor has
            raise InputError(
                f"{self.path}: {name} has the shape {piece.get_shape()}: fetch it again."
            ) from None

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
        found = weights_of(read_pt(self.path, mmap=is_zipped(self.path)))
        if not found:
            raise InputError(f"{self.path} holds no named tensors, at the top or under {', '.join(INSIDE)}.")
        check_names(list(found), self.path)
        for name, tensor in found.items():
            if (
                type(tensor) is not Tensor
                or tensor.layout != torch.strided
                or tensor.is_quantized
                or tensor.is_meta
            ):
                raise InputError(f"{self.path}: {name} is no plain tensor of numbers; convert it to one.")
            if tensor.nbytes > max(tensor.untyped_storage().nbytes(), SPREAD):
                raise InputError(
                    f"{self.path}: {name} has a shape of more bytes than the file holds: fetch it again."
                )
        return found


def weights_of(content: Mapping[str, Any], deepest: int = DEEPEST) -> dict[str, Tensor]:
    """The named tensors of a checkpoint: those at the top, or those under a usual name."""
    for key in INSIDE if deepest else ():
        inner = content.get(key)
        if isinstance(inner, Mapping) and (found := weights_of(inner, deepest - 1)):
            return found
    named = ((name, value) for name, value in content.items() if isinstance(name, str))
    return {name: value.detach() for name, value in named if isinstance(value, Tensor)}


def check_names(names: list[str], path: Path) -> None:
    """The names of a file's tensors; InputError where they are too many or too long to be a model's."""
    longest = max(map(len, names), default=0)
    if len(names) > MOST or longest > LONGEST:
        raise InputError(
            f"{path} holds {len(names)} tensors with names of up to {longest} characters; at most {MOST} of {LONGEST} are read."
        )


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
    content = read_json(index)
    table = content.get("weight_map") if isinstance(content, dict) else None
    files = list(table.values()) if isinstance(table, dict) else []
    if not files or not all(isinstance(name, str) and 0 < len(name) <= LONGEST // 2 for name in files):
        raise InputError(f"{index} is no index of shards: restore it from its source.")
    names = sorted(set(files))
    outside = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise InputError(
            f"{index} lists {outside[0]!r}, which is not in its folder: restore it from its source."
        )
    gone = [name for name in names if not (index.parent / name).is_file()]
    if gone:
        more = f", and {len(gone) - 10} more" if len(gone) > 10 else ""
        raise InputError(
            f"{index} lists shards that are missing: {', '.join(gone[:10])}{more}; fetch them again."
        )
    return [shard(index.parent / name) for name in names]


def read_tensors(
    file: Shard, names: Iterable[str], metas: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, tuple[Tensor, Tensor] | None]]:
    """The named tensors of a file, one at a time, fewer bits undone to float32, with [out, ...] int8 and scale [out] beside them.

    InputError where one holds NaN or infinity.
    """
    with file.opened() as get:
        for name in names:
            tensor, int8 = get(name), None
            if scaled(name, metas):
                int8 = unpack_int6(tensor) if tensor.dtype == torch.uint8 else tensor, get(name + SCALE)
                tensor = restored(*int8)
            check_finite(name, tensor, file.path)
            yield name, tensor, int8


def check_finite(name: str, tensor: Tensor, source: str | Path) -> None:
    """InputError where a tensor of weights holds NaN or infinity; one pass, cheaper than the copy that follows."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    ends = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
    if not all(map(math.isfinite, (ends.min.item(), ends.max.item()))):
        raise InputError(
            f"{source}: {name} holds NaN or infinity, so nothing can be drawn with it: fetch it again."
        )
