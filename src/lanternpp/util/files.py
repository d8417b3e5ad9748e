"""Files: replaced as a whole, swept after a kill; the user's cache."""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import shutil
import stat
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from lanternpp.errors import InputError

STALE = 600  # seconds after which what a killed process was writing is removed


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
        from safetensors import SafetensorError  # which takes longer to import than help takes to show

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


def size(folder: Path) -> int:
    """Bytes of all files under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def megabytes(count: int) -> str:
    """Bytes as text."""
    return f"{count / 1e6:.1f} MB"
