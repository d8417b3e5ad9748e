"""The options that say what to draw with, for verbs that are still made by Typer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lanternpp.api.options import EVERY, DrawOptions, dials
from lanternpp.cli import old_options as opt
from lanternpp.cli.options import check, method_for, read

__all__ = ["check", "draws", "method_for", "read"]

WITH: dict[str, tuple[Any, str | None]] = {
    "model": (opt.Model, opt.MODEL),
    "drafter": (opt.Drafter, None),
    "size": (opt.Size, None),
    "device": (opt.Device, "auto"),
    "dtype": (opt.Dtype, "auto"),
    "method": (opt.Method, opt.METHOD),
}
"""The options of `DrawOptions` besides its overrides, and their defaults."""


def draws(*without: str, groups: tuple[type, ...] = EVERY) -> Callable[..., Callable[..., None]]:
    """A decorator for verbs: their argument `options`, a `DrawOptions`, is made from options of the command line.

    without: names in `WITH` that the verb lacks. groups: the dials that it has; those that are given become overrides.
    """
    rows = dials(*groups)
    have = {name: option for name, option in WITH.items() if name not in without}
    have |= {dial.name: (dial.kind | None, opt.dial_option(dial)) for dial in rows}

    def make(**given: Any) -> DrawOptions:
        chosen = {dial.name: given.pop(dial.name) for dial in rows}
        overrides = {name: value for name, value in chosen.items() if value is not None}
        return DrawOptions(**given, overrides=overrides)

    return opt.bundled("options", have, make)
