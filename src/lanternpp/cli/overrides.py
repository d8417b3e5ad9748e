"""The options that override a method's parts and dials: the same in every verb that draws."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lanternpp.cli import options as opt
from lanternpp.errors import InputError
from lanternpp.methods import AUTO

if TYPE_CHECKING:
    from lanternpp.default_method import Chosen

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
    "verify": opt.Verify,
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


def method_for(
    model: str, drafter: str | None, method: str, device: str = "auto"
) -> tuple[Chosen, Mapping[str, Any]]:
    """The method that a name means on a model, and the model's defaults, before the model is read. InputError."""
    from lanternpp.default_method import Chosen, choose
    from lanternpp.devices import pick_device
    from lanternpp.models import model_folder, read_defaults
    from lanternpp.tuned import Tuned

    folder = model_folder(model)
    defaults = read_defaults(folder)
    if method != AUTO:
        return Chosen(method), defaults
    other, kind = model_folder(drafter) if drafter else None, pick_device(device).type
    return choose(method, folder, other, defaults, Tuned.read(folder, other), kind), defaults


def check(model: str, drafter: str | None, method: str, overrides: Mapping[str, Any]) -> None:
    """Refuse, before a model is read, what is wrong with a method's parts and dials, and dials no part reads."""
    import torch

    from lanternpp.accept import RULES
    from lanternpp.settings import build_rule, network_wanted, resolve

    chosen, defaults = method_for(model, drafter, method)
    settings = resolve(chosen.method, chosen.defaults(defaults), overrides, chosen.why is not None)
    if settings.accept in RULES:  # of an outsider's rule we do not know what it makes of an empty table
        build_rule(settings, lambda k: torch.empty(0, k, dtype=torch.int32))
    if network_wanted(settings) is None and drafter is not None:
        raise InputError(
            f"--drafter {drafter} would change nothing: the proposer {settings.proposer!r} has no drafter"
        )
