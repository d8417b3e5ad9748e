"""Caches of their own for processes that tests start."""

from __future__ import annotations

import shutil
from pathlib import Path

from lanternpp.kernels import library as native


def own_cache(folder: Path) -> str:
    """`folder` as a value of XDG_CACHE_HOME: empty but for the compiled kernels, which take seconds to compile."""
    kernels = native.library()
    if kernels is not None:
        made = Path(kernels._name)  # the file that was loaded
        copy = folder / made.parent.name / made.name
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not copy.exists():
            shutil.copy(made, copy)
    return str(folder)
