"""The files of a checkpoint, and their named tensors over a memory mapping, whose pages are freed when it ends.

Torch checkpoints hold tensors and plain containers; a pickle that would run code is rejected. A pickle that torch reads with
`weights_only` runs no code, but may still take hours or all memory, so its size is bounded: it has a few hundred bytes for each
tensor, and the tensors themselves lie beside it.
"""

from __future__ import annotations

import argparse
import math
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
MAX_FILE_NAME_CHARS = 250
MAX_DEPTH = 4  # nested dicts around the weights of a training script's checkpoint
WEIGHT_KEYS = ("model", "module", "state_dict", "ema")  # of the weights in a training script's checkpoint
USUAL_NAMES = ("model.", "pytorch_model.")  # how the names of most models' files begin
NEIGHBOURS = "neighbours-"  # how the names of tables begin that lie beside a model's weights
STATES = {f"{name}{end}" for name in ("optimizer", "scheduler", "scaler") for end in (".bin", ".pt")}
STATES |= {"state.pt", "training_args.bin", "rng_state.pth"}
MAX_PICKLE_BYTES = 1 << 21  # about 10,000 tensors
# A training script's options may lie beside its weights.
SAFE_CLASSES: list[Any] = [argparse.Namespace]
MAX_EXPANDED_BYTES = 1 << 24  # of a tensor that repeats fewer bytes of its file


@contextmanager
def input_errors(sentence: str, remedy: str = "fetch it again") -> Iterator[None]:
    """Turn errors of a library in this block into InputError: the sentence, the reason, the remedy."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        remedy = "install it" if isinstance(error, ImportError) else remedy
        raise InputError(f"{sentence} ({one_line(reason(error), 200)}): {remedy}.") from None


def opened(path: Path) -> tuple[list[str], Callable[[str], Tensor]]:
    """Return the names of a file's tensors, and a function from a name to its tensor, which keeps a mapping of the file.

    A torch checkpoint is read with `weights_only`; of nested dicts, the dict of the weights is taken. Raises InputError.
    """
    if not path.is_file():
        raise InputError(f"{path} is missing: fetch it again.")
    if path.suffix != SAFE:
        weights = weights_of(read_pt(path, mmap=True))
        if not weights:
            raise InputError(f"{path} holds no named tensors, at the top or under {', '.join(WEIGHT_KEYS)}.")
        return list(weights), weights.__getitem__
    with input_errors(f"{path} is truncated or no safetensors file"):
        file = safe_open(path, framework="pt")
        names = list(file.keys())

    def get(name: str) -> Tensor:
        with input_errors(f"{path}: {name} cannot be read"):
            try:
                return file.get_tensor(name)
            except ValueError as error:
                # Torch makes this error of an interrupt.
                if "could not determine the shape" not in str(error):
                    raise
                raise KeyboardInterrupt from None

    return names, get


def plain(name: str, tensor: Tensor, path: Path) -> Tensor:
    """Return the same tensor; InputError unless it has real numbers in memory, and no more bytes than its file."""
    strided = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_meta
    if not strided or tensor.is_quantized or tensor.is_complex():
        raise InputError(f"{path}: {name} is no plain tensor of real numbers; convert it to one.")
    if tensor.nbytes > max(tensor.untyped_storage().nbytes(), MAX_EXPANDED_BYTES):
        raise InputError(f"{path}: {name} has a shape of more bytes than the file holds: fetch it again.")
    return tensor


def read_pt(path: str | Path, mmap: bool = False) -> dict[str, Any]:
    """Read the dict in a torch checkpoint, a zip archive. mmap: its tensors lie over a mapping of the file.

    Raises InputError without torch's message, which may advise to let the file run code.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} is missing: fetch it again.")
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            file.seek(0)
            if file.read(4) != b"PK\x03\x04":
                raise zipfile.BadZipFile  # Torch would read it as an older version's pickle, of any length.
            for part in archive.infolist():
                is_long = part.filename.endswith(".pkl") and part.file_size > MAX_PICKLE_BYTES
                if is_long or part.compress_type != zipfile.ZIP_STORED:
                    raise InputError(
                        f"{path} holds more than {MAX_PICKLE_BYTES >> 20} MiB of pickle or compressed parts, which torch does not write: "
                        "convert it to safetensors."
                    )
        # Torch warns of what it cannot map or read; a file is read or refused.
        with torch.serialization.safe_globals(SAFE_CLASSES), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except InputError:
        raise
    except pickle.UnpicklingError:
        raise InputError(
            f"{path} could run code, or is damaged: convert it to safetensors, or fetch it again."
        ) from None
    except MemoryError:
        raise InputError(f"{path} asks for more memory than there is: convert it to safetensors.") from None
    except Exception as error:  # Torch raises errors of any class for a damaged file.
        raise InputError(
            f"{path} is truncated, or no checkpoint of torch 1.6 or newer: fetch it again."
        ) from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, where a dict of tensors is expected.")
    return content


def weights_of(content: Mapping[str, Any], max_depth: int = MAX_DEPTH) -> dict[str, Tensor]:
    """Return the named tensors of a checkpoint, at the top or under one of `WEIGHT_KEYS`."""
    for key in WEIGHT_KEYS if max_depth else ():
        nested = content.get(key)
        if isinstance(nested, Mapping) and (weights := weights_of(nested, max_depth - 1)):
            return weights
    tensors = ((name, value) for name, value in content.items() if isinstance(value, Tensor))
    return {name: tensor.detach() for name, tensor in tensors if isinstance(name, str)}


def files(path: Path) -> list[Path]:
    """Return the files of one checkpoint: a file, the shards of an index, or those of a folder."""
    if path.is_file():
        if path.name.endswith(INDEX):
            return indexed(path)
        if path.suffix in (SAFE, *PICKLED):
            return [path]
        raise InputError(f"{path} is no checkpoint: its name should end in {', '.join((SAFE, *PICKLED))}.")
    if not path.is_dir():
        raise InputError(f"{path} is missing: name a checkpoint file, or the folder that holds one.")
    paths = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith((".", NEIGHBOURS)))
    formats = []
    for suffixes in ((SAFE,), PICKLED):
        indices = [p for p in paths if p.name.endswith(INDEX) and any(s in p.name for s in suffixes)]
        weights = [p for p in paths if p.suffix in suffixes and p.name not in STATES]
        formats.append(indices or weights)
    # A model in .bin may have its image tokenizer beside it in safetensors, so the format of the model's usual names is first.
    for candidates in sorted(
        formats,
        key=lambda paths: not any(p.name.startswith(USUAL_NAMES) or p.name.endswith(INDEX) for p in paths),
    ):
        if any("-of-" in p.name and not p.name.endswith(INDEX) for p in candidates):
            raise InputError(f"{path} holds shards such as {candidates[0].name} without their {INDEX[1:]}.")
        usual = [p for p in candidates if p.name.startswith(USUAL_NAMES)]
        if len(candidates) > 1 and len(usual) != 1:
            names = join_names([p.name for p in candidates])
            raise InputError(f"{path} holds {len(candidates)} checkpoints ({names}): name one of them.")
        if candidates:
            return files(usual[0] if usual else candidates[0])
    raise InputError(f"{path} holds no checkpoint, such as model.safetensors, or its training never ended.")


def join_names(items: Sequence[str]) -> str:
    """Return the first ten items, and the number of further ones, as text."""
    ending = f", and {len(items) - 10} more" if len(items) > 10 else ""
    return ", ".join(items[:10]) + ending


def indexed(index: Path) -> list[Path]:
    """Return the shards that an index lists; InputError where a shard is missing."""
    content = read_json(index)
    table = content.get("weight_map") if isinstance(content, dict) else None
    shards = list(table.values()) if isinstance(table, dict) else []
    if not shards or not all(
        isinstance(name, str) and 0 < len(name) <= MAX_FILE_NAME_CHARS for name in shards
    ):
        raise InputError(f"{index} is no index of shards: restore it from its source.")
    names = sorted(set(shards))
    outside = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise InputError(
            f"{index} lists {outside[0]!r}, which is not in its folder: restore it from its source."
        )
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise InputError(f"{index} lists shards that are missing: {join_names(missing)}; fetch them again.")
    return [index.parent / name for name in names]


def check_finite(name: str, tensor: Tensor, source: str | Path) -> None:
    """Raise InputError where a tensor of weights holds NaN or infinity; one pass, cheaper than a copy of the tensor."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    extremes = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
    if not math.isfinite(extremes.min.item()) or not math.isfinite(extremes.max.item()):
        raise InputError(
            f"{source}: {name} holds NaN or infinity, so nothing can be drawn with it: fetch it again."
        )
