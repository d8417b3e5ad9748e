"""The option `--plots`: plots are drawn where matplotlib is installed, and nothing else needs it."""

from __future__ import annotations

from lanternpp.cli.terminal import say
from lanternpp.errors import InputError


def plots_enabled(plots: bool | None) -> bool:
    """Whether to draw plots. InputError where --plots is given and matplotlib is missing."""
    if plots is False:
        return False
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        if plots:
            raise InputError("plots need matplotlib; install lanternpp[eval], or leave out --plots") from None
        say("note", "no plots are drawn: they need matplotlib; install lanternpp[eval]")
        return False
    return True
