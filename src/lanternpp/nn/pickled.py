"""Torch checkpoints (`.pt`, `.pth`, `.bin`): tensors and plain containers; a pickle that would run code is refused.

What torch reads with `weights_only` runs no code, but it may still take hours or all memory, so the pickle's size is
bounded: it names and places tensors, a few hundred bytes each, and the tensors lie beside it.
"""

from __future__ import annotations

import argparse
import io
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from lanternpp.errors import InputError

MOST = 1 << 21  # bytes of pickle: about 10,000 tensors
DAMAGED = "is truncated or no torch checkpoint: fetch it again"
OPTIONS: list[Any] = [argparse.Namespace]  # a training script's own, which may lie beside its weights


class TooLongError(Exception):
    """A pickle is longer than `MOST` bytes."""


def read_pt(path: str | Path, mmap: bool = False) -> dict[str, Any]:
    """The dict in a checkpoint. mmap: tensors lie over a mapping of the file, where its format allows that.

    Raises InputError; torch's own words, which may advise to let the file run code, are not repeated.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} is missing.")
    try:
        content = _load(path, mmap)
    except pickle.UnpicklingError:
        raise InputError(
            f"{path} could run code, or is damaged: convert it to safetensors, or fetch it again."
        ) from None
    except TooLongError:
        raise InputError(
            f"{path} holds more than {MOST >> 20} MiB of pickle or compressed parts, which torch does not write: "
            "convert it to safetensors."
        ) from None
    except MemoryError:
        raise InputError(f"{path} asks for more memory than there is: convert it to safetensors.") from None
    except Exception as error:  # a damaged file makes torch raise anything; the cure is the same
        raise InputError(f"{path} {DAMAGED}.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, where a dict of tensors is expected.")
    return content


def is_zipped(path: Path) -> bool:
    """Whether a checkpoint is of the format since torch 1.6: a zip archive, which can be mapped."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _load(path: Path, mmap: bool) -> Any:
    """The content, of any type. Raises whatever torch raises."""
    with torch.serialization.safe_globals(OPTIONS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if is_zipped(path):
            with zipfile.ZipFile(path) as archive:
                for part in archive.infolist():
                    if part.compress_type != zipfile.ZIP_STORED or (
                        part.filename.endswith(".pkl") and part.file_size > MOST
                    ):
                        raise TooLongError
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        with _Counted(io.FileIO(path)) as file:
            return torch.load(file, map_location="cpu", weights_only=True)


class _Counted(io.BufferedReader):
    """A file of which so many bytes may be read as pickle; torch reads tensors past it, from the descriptor."""

    left = MOST

    def read(self, size: int | None = -1, /) -> bytes:
        """The bytes, counted."""
        return self._counted(super().read(size if size is None or size < 0 else min(size, self.left + 1)))

    def readline(self, size: int | None = -1, /) -> bytes:
        """The bytes, counted."""
        return self._counted(super().readline(self.left + 1))

    def _counted(self, content: bytes) -> bytes:
        self.left -= len(content)
        if self.left < 0:
            raise TooLongError
        return content
