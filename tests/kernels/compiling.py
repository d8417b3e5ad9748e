"""The compiler of setup.py, for libraries that tests need besides those that are installed."""

from __future__ import annotations

import fcntl
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """Hold a lock, so that no other process of this test run compiles the same file meanwhile."""
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def setup() -> ModuleType:
    """setup.py, which builds nothing when it is imported."""
    spec = importlib.util.spec_from_file_location("setup_of_kernels", Path(__file__).parents[2] / "setup.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
