"""Files: replaced as a whole, swept after a kill; locked folders; names; the user's cache."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import stat
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from lanternpp.errors import InputError

LOCK = ".lanternpp.lock"
STALE = 600  # seconds after which the files that a killed process was writing are removed


def write_text(path: Path, text: str) -> None:
    """A text file, replaced as a whole."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def umask() -> int:
    """The permissions that new files are made without."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name in the same folder that takes `path`'s place on success and goes away on failure.

    The folder is made where it is missing. Raises InputError where the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if is_full(error):
            reason = "could not be written, the disk is full: free some room and run the command again."
            raise InputError(f"{path} {reason}") from None
        name = getattr(error, "filename", None)
        writing = isinstance(error, OSError) and (name is None or Path(name) in (temporary, *path.parents))
        # an error of safetensors, which takes longer to import than help takes to show
        if writing or (type(error).__name__ == "SafetensorError" and "os error" in str(error)):
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(f"{path} cannot be written: {reason}") from None
        raise


def is_full(error: BaseException) -> bool:
    """Whether an error, or one before it that a library met, says that a disk, or a user's share of it, is full."""
    full = (errno.ENOSPC, errno.EDQUOT)
    said = getattr(error, "errno", None) in full or any(os.strerror(code) in str(error) for code in full)
    return said or (error.__context__ is not None and is_full(error.__context__))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder while the block runs, so that only one command at a time writes to it.

    The folder is made where it is missing, and then removed if it is left empty. The kernel releases the lock of a process
    that was killed. Raises InputError, which names the process that has the lock, or where the folder cannot be written.
    """
    from filelock import FileLock, Timeout  # not needed to show help

    made = [path for path in (folder, *folder.parents) if not path.exists()]
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path).acquire(blocking=False)
    except Timeout:
        holder = ""
        with suppress(OSError):  # it ends now, and has removed the file
            holder = path.read_text(encoding="utf-8")
        raise InputError(
            f"{folder} is being filled by another process ({holder or 'just started'}); wait for it to end, or choose "
            "another folder"
        ) from None
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from None
    with lock:
        try:
            try:
                path.write_text(f"{os.getpid()} on {platform.node()}", encoding="utf-8")
            except OSError as error:  # a full disk, which names no file
                raise OSError(error.errno, error.strerror, str(path)) from None
            yield
        finally:
            with suppress(OSError):
                path.unlink()
                for each in made:
                    each.rmdir()


def sweep(folder: Path, stale: float = STALE) -> None:
    """Remove the files that `replacing`, or safetensors in it, left in a folder when its process was killed.

    stale: the seconds that it must be old.
    """
    # the second as safetensors names what it is writing
    for path in (*folder.glob(".*.tmp"), *folder.glob(".tmp" + "[A-Za-z0-9]" * 6)):
        owner = path.name.split(".")[-2]
        alive = Path(f"/proc/{owner}").exists() or not Path("/proc").is_dir()
        left = path.is_file() if path.suffix != ".tmp" else owner.isdecimal() and not alive
        if left and time.time() - path.stat().st_mtime > stale:
            path.unlink(missing_ok=True)


def user_cache() -> Path:
    """The folder for files that can be made again on this machine. An XDG_CACHE_HOME that is empty or relative is ignored."""
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
    return Path(_temporary_cache(folder, reason).name)


@cache
def _temporary_cache(instead: Path, reason: str) -> TemporaryDirectory[str]:
    """A folder of this user alone, removed when the process ends. The warning comes once."""
    warnings.warn(
        f"{instead} {reason}, so that its compiled code is not kept for the next run: set XDG_CACHE_HOME to a folder of your own",
        stacklevel=3,
    )
    return TemporaryDirectory(prefix="lanternpp-", ignore_cleanup_errors=True)


def digest(parts: Iterable[str]) -> str:
    """First 16 hexadecimal digits of the SHA-256 of some lines of text."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def size(folder: Path) -> int:
    """Bytes of all files under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def megabytes(count: int) -> str:
    """Bytes as text, from 1,000 MB on in GB."""
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def slug(prompt: str) -> str:
    """A prompt's words joined by hyphens, at most 50 characters of any script."""
    return "-".join(re.findall(r"[^\W_]+", prompt.lower()))[:50].strip("-") or "picture"
