"""The options that override a method's parts and dials: the same in every verb that draws."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from lanternpp.cli import options as opt
from lanternpp.errors import InputError

OVERRIDES: dict[str, Any] = {
    "batch_size": opt.BatchSize,
    "compile": opt.Compile,
    "proposer": opt.Proposer,
    "tree": opt.Tree,
    "accept": opt.Accept,
    "neighbours": opt.Neighbours,
    "delta": opt.Delta,
    "lam": opt.Lambda,
    "nu": opt.Nu,
    "residual": opt.Residual,
    "window": opt.Window,
    "coupling": opt.Coupling,
    "fresh": opt.Fresh,
    "measure": opt.Measure,
    "cfg": opt.Cfg,
    "temperature": opt.Temperature,
    "top_k": opt.TopK,
    "top_p": opt.TopP,
}
"""The options that override a field of `Settings`, by its name; None: not given."""


def takes_overrides(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb with an option for each of `OVERRIDES`; those that were given are its argument `overrides`."""
    declared = inspect.signature(verb, eval_str=True).parameters

    @functools.wraps(verb)
    def run(**options: Any) -> None:
        chosen = {name: options.pop(name) for name in OVERRIDES}
        verb(**options, overrides={k: v for k, v in chosen.items() if v is not None})

    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [p.replace(kind=keyword) for name, p in declared.items() if name != "overrides"]
    options += [
        inspect.Parameter(name, keyword, default=None, annotation=option)
        for name, option in OVERRIDES.items()
    ]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def check(model: str, drafter: str | None, method: str, overrides: Mapping[str, Any]) -> None:
    """Refuse, before a model is read, what is wrong with a method's parts and dials, and dials no part reads."""
    import torch

    from lanternpp.accept import RULES
    from lanternpp.models import model_folder, read_defaults
    from lanternpp.settings import build_proposer, build_rule, resolve

    class NetworkWantedError(Exception):
        """The proposer's dials are fine; what it wants next is a network."""

    def ask(*folder: str) -> NoReturn:
        raise NetworkWantedError

    settings = resolve(method, read_defaults(model_folder(model)), overrides)
    if settings.accept in RULES:  # of an outsider's rule we do not know what it makes of an empty table
        build_rule(settings, lambda k: torch.empty(0, k, dtype=torch.int32))
    try:
        build_proposer(settings, ask, ask)
    except NetworkWantedError:
        return
    if drafter is not None:
        raise InputError(
            f"--drafter {drafter} would change nothing: the proposer {settings.proposer!r} has no drafter"
        )
