"""One job at a time on a folder, so that two do not mix their pictures."""

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
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder while pictures are written to it; made where it is missing, and removed if it is left empty.

    The kernel lets go of the lock of a process that was killed. Raises InputError naming the process that holds it.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = hold(folder / LOCK)
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


def hold(path: Path) -> IO[str]:
    """The lock file, locked, with this process's name in it; InputError where another has it."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
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
        file.close()  # its last holder removed it just before it was locked here
    file.truncate(0)
    file.write(f"{os.getpid()} on {platform.node()}")
    file.flush()
    return file
