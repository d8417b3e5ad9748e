"""Files of named tensors: which files a checkpoint has, and their tensors over a mapping, whose pages are freed when it ends.

Torch checkpoints hold tensors and plain containers; a pickle that would run code is rejected. What torch reads with `weights_only`
runs no code, but it may still take hours or all memory, so the pickle's size is bounded: it names and places tensors, a few hundred
bytes each, and the tensors lie beside it.
"""

from __future__ import annotations

import argparse
import io
import math
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lanternpp.errors import InputError, one_line, reason
from lanternpp.util.jsonfile import read_json

SAFE = ".safetensors"
PICKLED = (".pt", ".pth", ".bin", ".ckpt")
INDEX = ".index.json"
MOST, LONGEST = 100_000, 500  # tensors of a file, characters of a tensor's name
DEEPEST = 4  # dicts in each other around the weights of a training script's checkpoint
INSIDE = ("model", "module", "state_dict", "ema")  # where a training script's checkpoint keeps its weights
NEIGHBOURS = "neighbours-"  # tables that lie beside a model's weights; their names begin with it
NOT_WEIGHTS = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"}
MOST_PICKLE = 1 << 21  # bytes of a pickle: about 10,000 tensors
PLAIN: list[Any] = [argparse.Namespace]  # of a training script, which may lie beside its weights
SPREAD = 1 << 24  # bytes of a tensor that may repeat fewer bytes of its file

Get = Callable[[str], Tensor]


@contextmanager
def wrong_file(sentence: str, remedy: str = "fetch it again") -> Iterator[None]:
    """Whatever a library raises in this block about a wrong file becomes InputError: the sentence, the reason, the remedy."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        remedy = "install it" if isinstance(error, ImportError) else remedy
        raise InputError(f"{sentence} ({one_line(reason(error), 200)}): {remedy}.") from None


@contextmanager
def opened(path: Path) -> Iterator[tuple[list[str], Get]]:
    """The names of a file's tensors, and a function from a name to its tensor, over a mapping that ends with the context.

    A torch checkpoint is read with `weights_only`; of nested ones, the dict that holds the weights. Raises InputError.
    """
    if not path.is_file():
        raise InputError(f"{path} is missing: fetch it again.")
    if path.suffix != SAFE:
        found = weights_of(read_pt(path, mmap=True))
        if not found:
            raise InputError(f"{path} holds no named tensors, at the top or under {', '.join(INSIDE)}.")
        yield list(found), found.__getitem__
        return
    with ExitStack() as stack:
        with wrong_file(f"{path} is truncated or no safetensors file"):
            file = stack.enter_context(safe_open(path, framework="pt"))
            names = list(file.keys())

        def get(name: str) -> Tensor:
            with wrong_file(f"{path}: {name} cannot be read"):
                return file.get_tensor(name)

        yield names, get


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


class TooLongError(Exception):
    """A pickle is longer than `MOST_PICKLE` bytes."""


def read_pt(path: str | Path, mmap: bool = False) -> dict[str, Any]:
    """The dict in a torch checkpoint. mmap: tensors lie over a mapping of the file, where its format allows that.

    Raises InputError; torch's own words, which may advise to let the file run code, are not repeated.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} is missing: fetch it again.")
    try:
        content = _load(path, mmap)
    except pickle.UnpicklingError:
        raise InputError(
            f"{path} could run code, or is damaged: convert it to safetensors, or fetch it again."
        ) from None
    except TooLongError:
        raise InputError(
            f"{path} holds more than {MOST_PICKLE >> 20} MiB of pickle or compressed parts, which torch does not write: "
            "convert it to safetensors."
        ) from None
    except MemoryError:
        raise InputError(f"{path} asks for more memory than there is: convert it to safetensors.") from None
    except Exception as error:  # a damaged file makes torch raise anything; the cure is the same
        raise InputError(f"{path} is truncated or no torch checkpoint: fetch it again.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, where a dict of tensors is expected.")
    return content


def _load(path: Path, mmap: bool) -> Any:
    """The content, of any type. Raises whatever torch raises."""
    with torch.serialization.safe_globals(PLAIN), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _Counted(io.FileIO(path)) as file:
            # a zip archive, since torch 1.6, can be mapped
            if file.peek(4)[:4] != b"PK\x03\x04":
                return torch.load(file, map_location="cpu", weights_only=True)
        with zipfile.ZipFile(path) as archive:
            for part in archive.infolist():
                long = part.filename.endswith(".pkl") and part.file_size > MOST_PICKLE
                if long or part.compress_type != zipfile.ZIP_STORED:
                    raise TooLongError
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


class _Counted(io.BufferedReader):
    """A file with a limit on the bytes that are read as pickle; torch reads tensors past it, from the descriptor."""

    left = MOST_PICKLE

    def read(self, size: int | None = -1, /) -> bytes:
        return self._counted(super().read(size if size is None or size < 0 else min(size, self.left + 1)))

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._counted(super().readline(self.left + 1))

    def _counted(self, content: bytes) -> bytes:
        self.left -= len(content)
        if self.left < 0:
            raise TooLongError
        return content


def weights_of(content: Mapping[str, Any], deepest: int = DEEPEST) -> dict[str, Tensor]:
    """The named tensors of a checkpoint, at the top or under a usual name."""
    for key in INSIDE if deepest else ():
        inner = content.get(key)
        if isinstance(inner, Mapping) and (found := weights_of(inner, deepest - 1)):
            return found
    named = ((name, value) for name, value in content.items() if isinstance(name, str))
    return {name: value.detach() for name, value in named if isinstance(value, Tensor)}


def files(path: Path) -> list[Path]:
    """The files of one checkpoint: a file, the shards of an index, or the ones in a folder."""
    if path.is_file():
        if path.name.endswith(INDEX):
            return indexed(path)
        if path.suffix in (SAFE, *PICKLED):
            return [path]
        raise InputError(f"{path} is no checkpoint: its name should end in {', '.join((SAFE, *PICKLED))}.")
    if not path.is_dir():
        raise InputError(f"{path} is missing: name a checkpoint file, or the folder that holds one.")
    there = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith((".", NEIGHBOURS)))
    formats = []
    for suffixes in ((SAFE,), PICKLED):
        held = [p for p in there if p.suffix in suffixes and p.name not in NOT_WEIGHTS]
        index = [p for p in there if p.name.endswith(INDEX) and any(s in p.name for s in suffixes)]
        formats.append((held, index))
    # a model in .bin may have its image tokenizer beside it in safetensors
    for held, index in sorted(formats, key=lambda format: not (format[1] or usual(format[0]))):
        if index:
            return indexed(only(path, index))
        if any("-of-" in p.name for p in held):
            raise InputError(f"{path} holds shards such as {held[0].name} without their {INDEX[1:]}.")
        if held:
            return [only(path, held)]
    raise InputError(f"{path} holds no checkpoint: no file ends in {', '.join((SAFE, *PICKLED))}.")


def usual(found: list[Path]) -> list[Path]:
    """The files with a name that most models' files have."""
    return [p for p in found if p.name.split(".")[0] in ("model", "pytorch_model")]


def only(folder: Path, found: list[Path]) -> Path:
    """The one file, or the one with the usual name; InputError naming them all where neither exists."""
    named = usual(found)
    chosen = named if len(named) == 1 else found
    if len(chosen) > 1:
        names = ", ".join(p.name for p in found[:10])
        raise InputError(f"{folder} holds {len(found)} checkpoints ({names}): name one of them.")
    return chosen[0]


def listed(things: Sequence[str]) -> str:
    """The first ten, and how many more there are."""
    more = f", and {len(things) - 10} more" if len(things) > 10 else ""
    return ", ".join(things[:10]) + more


def indexed(index: Path) -> list[Path]:
    """The shards that an index lists; InputError where one is missing."""
    content = read_json(index)
    table = content.get("weight_map") if isinstance(content, dict) else None
    shards = list(table.values()) if isinstance(table, dict) else []
    if not shards or not all(isinstance(name, str) and 0 < len(name) <= LONGEST // 2 for name in shards):
        raise InputError(f"{index} is no index of shards: restore it from its source.")
    names = sorted(set(shards))
    outside = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise InputError(
            f"{index} lists {outside[0]!r}, which is not in its folder: restore it from its source."
        )
    gone = [name for name in names if not (index.parent / name).is_file()]
    if gone:
        raise InputError(f"{index} lists shards that are missing: {listed(gone)}; fetch them again.")
    return [index.parent / name for name in names]


def check_finite(name: str, tensor: Tensor, source: str | Path) -> None:
    """InputError where a tensor of weights holds NaN or infinity; one pass, cheaper than the copy that follows."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    ends = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
    if not all(map(math.isfinite, (ends.min.item(), ends.max.item()))):
        raise InputError(
            f"{source}: {name} holds NaN or infinity, so nothing can be drawn with it: fetch it again."
        )
