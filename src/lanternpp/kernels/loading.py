"""The compiled kernels: the library in `lib/` that suits this CPU, checked before it is loaded.

`setup.py` compiles them when the package is built. Without them, or with LANTERNPP_KERNELS=0 in the environment, PyTorch
computes everything; LANTERNPP_KERNELS=avx-vnni, say, takes the kernels for another kind of CPU than the best.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from lanternpp.errors import InputError
from lanternpp.kernels.binding import bind
from lanternpp.kernels.kinds import choose
from lanternpp.util.jsonfile import read_object

SWITCH = "LANTERNPP_KERNELS"
HERE = Path(__file__).parent
LIBRARIES = HERE / "lib"

# The kernels are not linked with a library of OpenMP, as a second library has other threads than PyTorch's. PyTorch's own,
# whose name may have a digest, is made visible to them on Linux; on other systems the kernels have threads of their own.
if sys.platform == "linux":
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        bundled = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
        with suppress(OSError):  # loading kernels that need OpenMP then raises the error
            ctypes.CDLL(str(bundled[0]) if bundled else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
    # A forked child would wait forever for OpenMP's threads, which it lacks. Both processes start new ones when needed.
    with suppress(AttributeError):  # before OpenMP 5.0
        end_threads = ctypes.CDLL(None).omp_pause_resource_all
        os.register_at_fork(before=lambda: end_threads(2))  # omp_pause_hard


def kernels() -> ctypes.CDLL | None:
    """Return the kernels that LANTERNPP_KERNELS asks for, the best by default; None where it is 0 or there are no kernels."""
    switch = os.environ.get(SWITCH, "")
    kind = None if switch in ("", "1") else switch
    return None if switch == "0" else library(kind)


@cache
def library(kind: str | None = None) -> ctypes.CDLL | None:
    """Return the kernels for a kind of CPU, by default the best that this CPU can run; None, with a warning, where none can be loaded.

    InputError where this CPU or this installation does not have the kind, or where the library is of another version than
    this code.
    """
    try:
        files = installed()
        runnable = [name for name in choose(features(_intact(files.pop("cpu")))) if name in files]
        if kind is not None and kind not in runnable:
            choices = ", ".join([*runnable, "0"])
            raise InputError(f"{SWITCH}: there are no kernels {kind!r} for this CPU: choose {choices}.")
        if not runnable:
            raise OSError(f"there are no kernels for this CPU, only for {', '.join(sorted(files))}")
        return load(_intact(files[kind or runnable[0]]))
    except OSError as error:
        warnings.warn(f"{error}; without kernels passes take several times as long", stacklevel=2)
        return None


def load(path: Path) -> ctypes.CDLL:
    """Load a library of kernels. OSError where that fails, InputError where its structures are not those of this code."""
    loaded = ctypes.CDLL(str(path))
    try:
        bind(loaded)
    except (AttributeError, ValueError) as error:
        raise InputError(
            f"{path.name} was not compiled from this version ({error}): install lanternpp again, or set {SWITCH}=0."
        ) from None
    return loaded


def installed() -> dict[str, str]:
    """Return the libraries' files by kind, as `manifest.json` has them. OSError where there are none or the manifest is damaged."""
    manifest = LIBRARIES / "manifest.json"
    if not manifest.is_file():
        raise OSError(
            "kernels were not compiled: install lanternpp (pip install .) where there is a C compiler"
        )
    try:
        content = read_object(manifest)
        files, missing, sources = (content[name] for name in ("libraries", "missing", "sources"))
        if files and "cpu" not in dict(files):
            raise KeyError("cpu")
    except (InputError, KeyError, TypeError, ValueError):
        raise OSError(f"{manifest} is damaged: install lanternpp again") from None
    if not files:
        raise OSError(f"kernels were not compiled: {missing}")
    code = sorted((HERE / "csrc").glob("*.[ch]"))  # only a checkout has sources
    if code and _digest(*code) != sources:
        warnings.warn(
            "kernels/csrc has changed since it was compiled: run python setup.py build_ext --inplace",
            stacklevel=2,
        )
    return files


def features(path: Path) -> frozenset[str]:
    """Return the CPU's features that its operating system allows, by the names of `kinds.py`; path: the compiled `cpu.c`."""
    names = ctypes.CDLL(str(path)).cpu_features
    names.restype = ctypes.c_char_p
    return frozenset(names().decode().split())


def _intact(name: str) -> Path:
    """Return the path of a library; OSError unless it has the digest in its name, as a truncated file would end the process."""
    path = LIBRARIES / name
    try:
        digest = _digest(path)
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}): install lanternpp again") from None
    if digest != path.stem.rpartition("-")[2]:
        raise OSError(f"{path} is damaged: install lanternpp again")
    return path


def _digest(*files: Path) -> str:
    """Return the digest that `digest` of setup.py computes."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
