"""Files of named tensors: which files a checkpoint has, and their tensors over a mapping, so that what has been read is let go."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lanternpp.errors import InputError, one_line
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
SPREAD = 1 << 24  # bytes of a tensor that may repeat fewer bytes of its file

Get = Callable[[str], Tensor]


@contextmanager
def opened(path: Path) -> Iterator[tuple[list[str], Get]]:
    """The names of a file's tensors, and what gives one by its name, over a mapping that ends with the context.

    A torch checkpoint is read with `weights_only`; of nested ones, the dict that holds the weights. Raises InputError.
    """
    if not path.is_file():
        raise InputError(f"{path} is missing: fetch it again.")
    if path.suffix != SAFE:
        found = weights_of(read_pt(path, mmap=is_zipped(path)))
        if not found:
            raise InputError(f"{path} holds no named tensors, at the top or under {', '.join(INSIDE)}.")
        yield list(found), found.__getitem__
        return
    try:
        file = safe_open(path, framework="pt").__enter__()
        names = list(file.keys())
    except Exception as error:  # SafetensorError, OSError, or whatever a wrong header makes the library raise
        raise InputError(
            f"{path} is truncated or no safetensors file ({one_line(str(error), 200)}): fetch it again."
        ) from None

    def get(name: str) -> Tensor:
        try:
            tensor: Tensor = file.get_tensor(name)
        except Exception as error:
            raise InputError(f"{path}: {name} cannot be read ({one_line(str(error), 200)}).") from None
        return tensor

    try:
        yield names, get
    finally:
        file.__exit__(None, None, None)


def metas(path: Path, any_names: bool = False) -> dict[str, Tensor]:
    """Every tensor's shape and dtype, on the meta device; no data is read.

    any_names: names that no model has, too many or too long, are taken as well. Raises InputError.
    """
    with opened(path) as (names, get):
        longest = max(map(len, names), default=0)
        if not any_names and (len(names) > MOST or longest > LONGEST):
            raise InputError(
                f"{path} holds {len(names)} tensors with names of up to {longest} characters; at most {MOST} of {LONGEST} are read."
            )
        return {name: plain(name, get(name), path).to("meta") for name in names}


def plain(name: str, tensor: Tensor, path: Path) -> Tensor:
    """The same tensor. InputError where it is none of numbers in memory, or has more of them than its file."""
    odd = (
        type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta
    )
    if odd or tensor.is_complex():
        raise InputError(f"{path}: {name} is no plain tensor of real numbers; convert it to one.")
    if tensor.nbytes > max(tensor.untyped_storage().nbytes(), SPREAD):
        raise InputError(f"{path}: {name} has a shape of more bytes than the file holds: fetch it again.")
    return tensor


def weights_of(content: Mapping[str, Any], deepest: int = DEEPEST) -> dict[str, Tensor]:
    """The named tensors of a checkpoint: those at the top, or those under a usual name."""
    for key in INSIDE if deepest else ():
        inner = content.get(key)
        if isinstance(inner, Mapping) and (found := weights_of(inner, deepest - 1)):
            return found
    named = ((name, value) for name, value in content.items() if isinstance(name, str))
    return {name: value.detach() for name, value in named if isinstance(value, Tensor)}


def files(path: Path) -> list[Path]:
    """The files of one checkpoint: a file, the shards of an index, or what a folder holds of these."""
    if path.is_file():
        if path.name.endswith(INDEX):
            return indexed(path)
        if path.suffix in (SAFE, *PICKLED):
            return [path]
        raise InputError(f"{path} is no checkpoint: its name should end in {', '.join((SAFE, *PICKLED))}.")
    if not path.is_dir():
        raise InputError(f"{path} is missing: name a checkpoint file, or the folder that holds one.")
    there = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
    for suffixes in ((SAFE,), PICKLED):
        held = [p for p in there if p.suffix in suffixes and p.name not in NOT_WEIGHTS]
        index = [p for p in there if p.name.endswith(INDEX) and any(s in p.name for s in suffixes)]
        if index:
            return indexed(only(path, index))
        if any("-of-" in p.name for p in held):
            raise InputError(f"{path} holds shards such as {held[0].name} without their {INDEX[1:]}.")
        if held:
            return [only(path, held)]
    raise InputError(f"{path} holds no checkpoint: no file ends in {', '.join((SAFE, *PICKLED))}.")


def only(folder: Path, found: list[Path]) -> Path:
    """The one file, or the one with the usual name; InputError naming them all where neither exists."""
    usual = [p for p in found if p.name.split(".")[0] in ("model", "pytorch_model")]
    chosen = usual if len(usual) == 1 else found
    if len(chosen) > 1:
        names = ", ".join(p.name for p in found[:10])
        raise InputError(f"{folder} holds {len(found)} checkpoints ({names}): name one of them.")
    return chosen[0]


def indexed(index: Path) -> list[Path]:
    """The shards that an index lists; InputError where one is missing."""
    content = read_json(index)
    table = content.get("weight_map") if isinstance(content, dict) else None
    listed = list(table.values()) if isinstance(table, dict) else []
    if not listed or not all(isinstance(name, str) and 0 < len(name) <= LONGEST // 2 for name in listed):
        raise InputError(f"{index} is no index of shards: restore it from its source.")
    names = sorted(set(listed))
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
    return [index.parent / name for name in names]


def read_tensors(
    path: Path, names: Iterable[str], found: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, tuple[Tensor, Tensor] | None]]:
    """The named tensors of a file, one at a time, fewer bits undone to float32, with [out, ...] int8 and scale [out] beside them.

    found: the file's `metas`. InputError where one holds NaN or infinity.
    """
    with opened(path) as (_, get):
        for name in names:
            tensor, int8 = get(name), None
            if scaled(name, found):
                int8 = unpack_int6(tensor) if tensor.dtype == torch.uint8 else tensor, get(name + SCALE)
                tensor = restored(*int8)
            check_finite(name, tensor, path)
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
