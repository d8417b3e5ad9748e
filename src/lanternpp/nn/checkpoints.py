"""Model folders: `config.json` beside `model.safetensors`, written whole, read without trust."""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import shutil
import stat
import time
import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.jsonfile import read_object
from lanternpp.nn.pickled import read_pt as read_pt
from lanternpp.nn.shards import SafeShard, read_tensors
from lanternpp.nn.stores import STORES, Store, check_scales, is_scale, pack

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
STALE = 600  # seconds after which what a killed process was writing is removed


def save(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    store: Store = "float32",
    keep: Collection[str] = (),
) -> None:
    """Write a model folder; a kill at any moment leaves the old model, the new one, or no `config.json`.

    `store` is how floating-point tensors lie on disk. int8 and int6 are symmetric with one scale per output channel
    (dimension 0) for tensors of two or more dimensions; the rest, and the names in `keep`, stay float32. Where the
    channels are no multiple of four int6 is int8.
    """
    if store not in STORES:
        raise InputError(f"store {store!r} is unknown: choose {', '.join(STORES)}.")
    folder = Path(folder)
    text = json.dumps(dict(config), indent=2, sort_keys=True) + "\n"
    packed = pack(tensors, store, keep)
    target = folder / CONFIG
    if target.exists() and target.read_text(encoding="utf-8") != text:
        target.unlink()  # never new weights under an old config
    with replacing(folder / WEIGHTS) as temporary:
        save_file(packed, temporary, metadata={"format": "pt", "store": store})
        temporary.chmod(0o666 & ~umask())  # safetensors writes for the owner alone
    write_text(target, text)


def load(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of a model folder, on the CPU, fewer bits undone to float32."""
    folder = Path(folder)
    return load_config(folder), read_safetensors(folder / WEIGHTS)


def load_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a model folder."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise InputError(f"{path} is missing: {folder} is no model folder, or its training never ended.")
    return read_object(path)


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, on the CPU, fewer bits undone to float32."""
    file = SafeShard(Path(path))
    metas = file.metas(any_names=True)  # of features of text, the names are texts
    check_scales(metas, file.path)
    named = [name for name in metas if not is_scale(name, metas)]
    return {name: tensor for name, tensor, _ in read_tensors(file, named, metas)}


def write_pt(path: str | Path, content: Mapping[str, Any]) -> None:
    """A `.pt` of tensors and plain containers, replaced as a whole."""
    with replacing(Path(path)) as temporary, temporary.open("wb") as file:
        torch.save(dict(content), file)


def write_text(path: Path, text: str) -> None:
    """A text file, replaced as a whole."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def umask() -> int:
    """The permissions that new files are made without."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


class replacing:
    """A temporary name in the same folder that takes `path`'s place on success and goes away on failure.

    The folder is made where it is missing. Raises InputError where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> Path:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refusal(error) from None
        return self.temporary

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            try:
                os.replace(self.temporary, self.path)
                return
            except OSError as refused:
                error = refused
        with suppress(OSError):
            self.temporary.unlink(missing_ok=True)
        writing = isinstance(error, OSError) and error.filename in (None, str(self.temporary))
        if writing or (isinstance(error, SafetensorError) and "os error" in str(error)) or is_full(error):
            raise self._refusal(error) from None

    def _refusal(self, error: BaseException) -> InputError:
        if is_full(error):
            return InputError(
                f"{self.path} could not be written, the disk is full: free some room and run the command again."
            )
        return InputError(f"{self.path} cannot be written: {getattr(error, 'strerror', None) or error}")


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk, or a user's share of it, is full."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "errno", None) in full or any(os.strerror(code) in str(error) for code in full)


def sweep(folder: Path, stale: float = STALE) -> None:
    """Remove what `replacing`, or safetensors in it, left in a folder when its process was killed.

    stale: the seconds that it must be old.
    """
    for path in folder.glob(".*.tmp"):
        owner = path.name.split(".")[-2]
        alive = Path(f"/proc/{owner}").exists() or not Path("/proc").is_dir()
        if owner.isdecimal() and not alive and time.time() - path.stat().st_mtime > stale:
            path.unlink(missing_ok=True)
    for path in folder.glob(".tmp" + "[A-Za-z0-9]" * 6):  # as safetensors names what it is writing
        if path.is_file() and time.time() - path.stat().st_mtime > stale:
            path.unlink(missing_ok=True)


def checksum(tensor: Tensor) -> str:
    """First 16 hexadecimal digits of the SHA-256 of a tensor's shape, dtype and bytes."""
    tensor = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def user_cache() -> Path:
    """The folder for what can be made again on this machine. An XDG_CACHE_HOME that is empty or relative is ignored."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "lanternpp"


def code_cache() -> Path:
    """`user_cache`, for files that are run: a folder of this user that nobody else can write.

    Where it is none, this is a temporary folder of this process, with a warning.
    """
    folder = user_cache()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        parent, found = folder.parent.stat(), folder.lstat()
        if not (stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()):
            reason = "is no folder of this user"
        # in a parent without the sticky bit whoever can write can put another folder in its place
        elif found.st_mode & stat.S_IWOTH or parent.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            reason = "can be written or replaced by every user"
        else:
            if found.st_mode & 0o077:
                folder.chmod(0o700)
            return folder
    except OSError as error:
        reason = f"cannot be used ({error.strerror})"
    return _temporary_cache(folder, reason)


@cache
def _temporary_cache(instead: Path, reason: str) -> Path:
    """A folder of this user alone, removed when the process ends. The warning comes once."""
    made = Path(mkdtemp(prefix="lanternpp-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    warnings.warn(
        f"{instead} {reason}, so that what is compiled is not kept for the next run: set XDG_CACHE_HOME to a folder of your own",
        stacklevel=3,
    )
    return made


def digest(parts: Iterable[str]) -> str:
    """First 16 hexadecimal digits of the SHA-256 of some lines of text."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
