"""A lock on a folder, so that only one job at a time writes pictures to it."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lanternpp.errors import InputError

LOCK = ".lanternpp.lock"
LOCKED_ERRORS = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder while the block runs. The folder is made where it is missing, and then removed if it is left empty.

    The kernel releases the lock of a process that was killed. Raises InputError, which names the process that has the
    lock, or where the folder cannot be written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = lock_file(folder / LOCK)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from None
    with file:
        try:
            yield
        finally:
            with suppress(OSError):
                (folder / LOCK).unlink()
                for path in made:
                    path.rmdir()


def lock_file(path: Path) -> IO[str]:
    """Open the lock file, lock it, and write this process's number into it. InputError where another process has it."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in LOCKED_ERRORS:
                file.seek(0)
                raise InputError(
                    f"{path.parent} is being filled by another process ({file.read().strip() or 'just started'}); "
                    "wait for it to end, or choose another --out"
                ) from None
            warnings.warn(
                f"{path.parent} cannot be locked ({error.strerror}); start no other job on it", stacklevel=2
            )
            return file
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            break
        file.close()  # it was removed between opening and locking: open the new one
    file.truncate(0)
    file.write(f"{os.getpid()} on {platform.node()}")
    file.flush()
    return file
