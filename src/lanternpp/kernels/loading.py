"""The compiled kernels: which of the libraries in `lib/` suits this CPU, whether it is whole, and its functions.

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
from ctypes import c_char_p, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from lanternpp.errors import InputError
from lanternpp.kernels import structs
from lanternpp.kernels.kinds import choose
from lanternpp.util.jsonfile import read_object

SWITCH = "LANTERNPP_KERNELS"
HERE = Path(__file__).parent
LIBRARIES = HERE / "lib"
COST = "so that passes take two to three times as long"

# Functions of C by what they take: an address (p) or an integer (i), as most return one.
FUNCTIONS = {
    "": "prepare gemm_is_fp32 weight_zero",
    "i": "use_threads",
    "pi": "linear_bytes row_probs draw_children verify_tokenwise verify_joint step_bytes pack_linear",
    "iii": "row_bytes",
    "pii": "drafter_inputs_bytes",
    "piii": "chain_bytes run_step",
    "ppi": "sample_chain drafter_inputs linear",
    "pppi": "scratch_bytes decode",
}


def kernels() -> ctypes.CDLL | None:
    """The kernels that LANTERNPP_KERNELS asks for, the best by default; None where there are none, or it is 0."""
    wanted = os.environ.get(SWITCH, "")
    if wanted == "0":
        return None
    return library() if wanted in ("", "1") else library(wanted)


@cache
def library(kind: str | None = None) -> ctypes.CDLL | None:
    """The kernels for a kind of CPU, by default the best that this CPU can run; None, with a warning, where that is impossible.

    InputError where this CPU or this installation does not have the kind, or where the library is of another version than
    this code.
    """
    try:
        return load(_find(kind))
    except OSError as error:
        warnings.warn(f"{error}, {COST}", stacklevel=2)
        return None


def load(path: Path) -> ctypes.CDLL:
    """A library of kernels. OSError where it cannot be loaded, InputError where its structures are not those of this code."""
    _load_openmp()
    found = ctypes.CDLL(str(path))
    try:
        for arguments, names in FUNCTIONS.items():
            for name in names.split():
                function = getattr(found, name)
                function.restype = c_int64
                function.argtypes = [c_void_p if kind == "p" else c_int64 for kind in arguments]
        found.size_of.argtypes, found.size_of.restype = [c_char_p], c_int64
    except AttributeError as error:
        raise _stale(path, f"it lacks a function: {error}") from None
    for name, structure in structs.ALL.items():
        there, here = found.size_of(name.encode()), ctypes.sizeof(structure)
        if there != here:
            raise _stale(path, f"its {name} has {there} bytes and not {here}")
    found.prepare()
    return found


def _find(kind: str | None) -> Path:
    """The whole library for a kind of CPU. OSError with a sentence, or InputError."""
    files = _installed()
    able = choose(features(_whole(files["cpu"])))
    there = [name for name in able if name in files]
    if kind is not None and kind not in there:
        what = f"this CPU cannot run {kind!r}" if kind in files else f"there are no kernels for {kind!r}"
        raise InputError(f"{SWITCH}: {what}: choose {', '.join([*there, '0'])}.")
    if not there:
        raise OSError(
            f"there are no kernels for this CPU, only for {', '.join(sorted(files.keys() - {'cpu'}))}"
        )
    return _whole(files[kind or there[0]])


def _installed() -> dict[str, str]:
    """The libraries' files by kind, as `manifest.json` has them. OSError with a sentence."""
    manifest = LIBRARIES / "manifest.json"
    if not manifest.is_file():
        raise OSError(
            "kernels were not compiled: install lanternpp (pip install .) where there is a C compiler"
        )
    try:
        content = read_object(manifest)
        files, missing, sources = (content[name] for name in ("libraries", "missing", "sources"))
    except (InputError, KeyError):
        raise OSError(f"{manifest} is damaged: install lanternpp again") from None
    if not files:
        raise OSError(f"kernels were not compiled: {missing}")
    code = sorted((HERE / "csrc").glob("*.[ch]"))  # in a checkout alone
    if code and _digest(*code) != sources:
        warnings.warn(
            "kernels/csrc has changed since it was compiled: run python setup.py build_ext --inplace",
            stacklevel=2,
        )
    return files


def features(path: Path) -> frozenset[str]:
    """What this CPU has and its operating system allows, by the names of `kinds.py`; path: the compiled `cpu.c`."""
    names = ctypes.CDLL(str(path)).cpu_features
    names.restype = c_char_p
    return frozenset(names().decode().split())


def _whole(name: str) -> Path:
    """The path of a library that has the digest in its name: a file that was cut would end the process. OSError."""
    path = LIBRARIES / name
    try:
        found = _digest(path)
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}): install lanternpp again") from None
    if found != path.stem.rpartition("-")[2]:
        raise OSError(f"{path} is damaged: install lanternpp again")
    return path


def _digest(*files: Path) -> str:
    """As `digest` of setup.py."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _load_openmp() -> None:
    """Make OpenMP's functions visible to the kernels. These are linked with no library of it, as a second one has other threads.

    Linux alone: elsewhere the kernels have threads of their own. PyTorch brings the library, whose name may have a digest.
    """
    if sys.platform != "linux" or hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return
    own = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    with suppress(OSError):  # kernels that need it then say so
        ctypes.CDLL(str(own[0]) if own else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


def _stale(path: Path, why: str) -> InputError:
    return InputError(
        f"{path.name} was not compiled from this version ({why}): install lanternpp again, or set {SWITCH}=0."
    )
