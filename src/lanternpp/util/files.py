"""Files that are replaced as a whole, leftovers of killed processes, locked folders, file names, the user's cache."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import stat
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from lanternpp.errors import InputError

LOCK = ".lanternpp.lock"
STALE = 600  # seconds after which the unfinished files of a killed process are removed


def write_text(path: Path, text: str) -> None:
    """Write a text file, replaced as a whole. Raise InputError if it cannot be written."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def umask() -> int:
    """Return the permissions that new files do not get."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; rename that file to `path` on success, remove it on failure.

    A missing folder is made. Raise InputError if the file cannot be written.
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
        # The class is compared by name because importing safetensors takes longer than showing help.
        if writing or (type(error).__name__ == "SafetensorError" and "os error" in str(error)):
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(f"{path} cannot be written: {reason}") from None
        raise


def is_full(error: BaseException) -> bool:
    """Return whether an error, or an error in its context, says that a disk, or a user's share of a disk, is full."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    if getattr(error, "errno", None) in codes or any(os.strerror(code) in str(error) for code in codes):
        return True
    return error.__context__ is not None and is_full(error.__context__)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder while the block runs, so that only one command at a time writes to it.

    A missing folder is made, and removed at the end if it is empty. The kernel releases the lock of a killed process.
    Raise InputError, naming the holder, if another process has the lock, and if the folder cannot be written.
    """
    from filelock import FileLock, Timeout  # imported here because help does not need it

    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path).acquire(blocking=False)
    except Timeout:
        holder = ""
        with suppress(OSError):  # the other process may just have ended and removed the file
            holder = path.read_text(encoding="utf-8")
        raise InputError(
            f"{folder} is being filled by another process ({holder or 'just started'}); wait, or choose another folder"
        ) from None
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from None
    with lock:
        try:
            try:
                path.write_text(f"{os.getpid()} on {platform.node()}", encoding="utf-8")
            except OSError as error:
                # Windows has locked the file against every other handle. The error of a full disk names no file.
                if sys.platform != "win32":
                    raise OSError(error.errno, error.strerror, str(path)) from None
            yield
        finally:
            with suppress(OSError):
                path.unlink()
                for new_folder in new_folders:
                    new_folder.rmdir()


def sweep(folder: Path, stale: float = STALE) -> None:
    """Remove files, at least `stale` seconds old, that killed processes left unfinished in `replacing` or safetensors within it."""
    # Unfinished files of safetensors match the second pattern.
    for path in (*folder.glob(".*.tmp"), *folder.glob(".tmp" + "[A-Za-z0-9]" * 6)):
        owner = path.name.split(".")[-2]
        if path.suffix == ".tmp":
            abandoned = owner.isdecimal() and not _is_running(int(owner))
        else:
            abandoned = path.is_file()
        if abandoned and time.time() - path.stat().st_mtime > stale:
            path.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    """Return whether a process exists; always True on Windows, where `os.kill` would end it."""
    try:
        if sys.platform != "win32":
            os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # a process of another user
        pass
    return True


def user_cache() -> Path:
    """Return the folder for files that can be made again. An empty or relative XDG_CACHE_HOME is ignored."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (cache if cache.is_absolute() else Path.home() / ".cache") / "lanternpp"
    except RuntimeError:
        raise InputError("this user has no home folder; set HOME or XDG_CACHE_HOME to a folder") from None


def code_cache() -> Path:
    """Return a folder for compiled code that no other user can write: `user_cache` or, with a warning, a temporary folder."""
    folder = user_cache()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        parent, status = folder.parent.stat(), folder.lstat()
        if not hasattr(os, "geteuid"):  # on Windows the folders of a user are private
            return folder
        if not (stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()):
            reason = "is no folder of this user"
        # A user who can write to a parent without the sticky bit can replace the folder.
        elif status.st_mode & stat.S_IWOTH or parent.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            reason = "can be written or replaced by every user"
        else:
            if status.st_mode & 0o077:
                folder.chmod(0o700)
            return folder
    except OSError as error:
        reason = f"cannot be used ({error.strerror})"
    return Path(_temporary_cache(folder, reason).name)


@cache
def _temporary_cache(unsafe: Path, reason: str) -> TemporaryDirectory[str]:
    """Make a folder that is removed when the process ends; warn once that it replaces the `unsafe` folder."""
    warnings.warn(
        f"{unsafe} {reason}, so that its compiled code is not kept for the next run: set XDG_CACHE_HOME to a folder of your own",
        stacklevel=3,
    )
    return TemporaryDirectory(prefix="lanternpp-", ignore_cleanup_errors=True)


def digest(parts: Iterable[str]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of lines of text."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def size(folder: Path) -> int:
    """Return the bytes of all files under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def megabytes(count: int) -> str:
    """Return a number of bytes as text in MB, from 1,000 MB on in GB."""
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def slug(prompt: str) -> str:
    """Return a prompt's words joined by hyphens, at most 50 characters of any script."""
    return "-".join(re.findall(r"[^\W_]+", prompt.lower()))[:50].strip("-") or "picture"
