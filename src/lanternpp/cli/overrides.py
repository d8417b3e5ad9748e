"""The options that say what to draw with, a model, a method and its dials: the same in every verb that draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lanternpp.api.arguments import DrawOptions
from lanternpp.api.dials import EVERY, Group, dials
from lanternpp.api.methods import AUTO
from lanternpp.cli import options as opt
from lanternpp.cli.terminal import tell_effect
from lanternpp.errors import InputError

if TYPE_CHECKING:
    from lanternpp.api.default_method import Chosen
    from lanternpp.api.pipeline import Pipeline

WITH: dict[str, tuple[Any, str | None]] = {
    "model": (opt.Model, opt.MODEL),
    "drafter": (opt.Drafter, None),
    "size": (opt.Size, None),
    "device": (opt.Device, "auto"),
    "dtype": (opt.Dtype, "auto"),
    "method": (opt.Method, opt.METHOD),
}
"""The options of `DrawOptions` besides its overrides, and their defaults."""


def draws(*without: str, groups: tuple[Group, ...] = EVERY) -> Callable[..., Callable[..., None]]:
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


def read(options: DrawOptions, pictures: bool = True) -> Pipeline:
    """Read the model; says on stderr what weights in 8 bits change. Raises InputError.

    pictures: refuse a model whose codes cannot become pictures here.
    """
    from lanternpp import Pipeline
    from lanternpp.api.pixels import check_output

    pipe = Pipeline.from_pretrained(**options.pretrained)
    if pictures:
        check_output(pipe.target)
    tell_effect(pipe.effect)
    return pipe


def method_for(model: str, drafter: str | None, method: str) -> tuple[Chosen, Mapping[str, Any]]:
    """The method that a name means on a model, and the model's defaults, before the model is read. InputError."""
    from lanternpp.api.default_method import Chosen, choose
    from lanternpp.api.model import known_defaults, model_folder
    from lanternpp.api.tuned import Tuned

    folder = model_folder(model)
    defaults = known_defaults(folder)
    if method != AUTO:
        return Chosen(method), defaults
    other = model_folder(drafter) if drafter else None
    return choose(method, folder, other, defaults, Tuned.read(folder, other)), defaults


def check(options: DrawOptions) -> None:
    """Refuse, before a model is read, wrong parts or dials of a method, and dials that no part reads."""
    import torch

    from lanternpp.accept import RULES
    from lanternpp.api.settings import build_rule, network_needed, resolve

    drafter = options.drafter
    chosen, defaults = method_for(options.model, drafter, options.method)
    settings = resolve(chosen.method, defaults, options.overrides, chosen.why is not None)
    if settings.accept in RULES:  # a rule of another package might not take an empty table
        build_rule(settings, lambda k: torch.empty(0, k, dtype=torch.int32))
    if network_needed(settings) is None and drafter is not None:
        raise InputError(
            f"--drafter {drafter} would change nothing: the proposer {settings.proposer!r} has no drafter"
        )
