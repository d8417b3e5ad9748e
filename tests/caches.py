"""Caches of their own for processes that tests start."""

from __future__ import annotations

from pathlib import Path

from lanternpp.nn import native


def own_cache(folder: Path) -> str:
    """`folder` as a value of XDG_CACHE_HOME: empty but for the compiled kernels, which take seconds to compile."""
    kernels = native.library()
    if kernels is not None:
        made = Path(kernels._name)  # the file that was loaded
        link = folder / made.parent.name / made.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(made)
    return str(folder)
