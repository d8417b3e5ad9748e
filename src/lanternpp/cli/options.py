"""Options of the command line, made from annotations: `Annotated[int, Option("Pictures.", ge=1)]` is declared once, with its limits.

A verb is a function under `@verb`. Each of its parameters is an option; one that is a dataclass or a TypedDict is a group of options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from cyclopts import Group, Parameter

from lanternpp.api.options import AUTO, DIALS, DrawOptions
from lanternpp.cli.terminal import tell_effect
from lanternpp.errors import InputError
from lanternpp.util.options import Option, option_of

if TYPE_CHECKING:
    from lanternpp.api.default_method import Chosen
    from lanternpp.api.pipeline import Pipeline

F = TypeVar("F", bound=Callable[..., Any])
# Headings of help, in this order.
HEADINGS = (
    "Arguments",
    "Options",
    "Many pictures",
    "Ray",
    "Server",
    "Model",
    "Method",
    "Sampling",
    "Quality",
)


class Without(tuple[str, ...]):
    """Names of a group's fields that a verb has no options for: `Annotated[DrawOptions, Without(("size", "method"))]`."""


def verb(function: F) -> F:
    """A decorator that makes the annotations of a function ones that Cyclopts reads, and its docstring one line a paragraph."""
    paragraphs = (function.__doc__ or "").split("\n\n")
    function.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    hints = get_type_hints(function, include_extras=True)
    function.__annotations__ = {name: _parameter(name, hint) for name, hint in hints.items()}
    defaults = function.__kwdefaults__ or {}
    for name, default in defaults.items():
        if dataclasses.is_dataclass(default):  # Cyclopts has pydantic check that it is of the annotated class
            defaults[name] = get_args(function.__annotations__[name])[0](**vars(default))
    return function


def heading(name: str) -> Group:
    """A heading of help."""
    return Group(name, sort_key=HEADINGS.index(name) if name in HEADINGS else len(HEADINGS))


def _parameter(name: str, hint: Any, without: tuple[str, ...] = (), option: Option | None = None) -> Any:
    """The annotation of a parameter or field, with what Cyclopts is to know of its option or group of options."""
    kind, *meta = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    without += next((each for each in meta if isinstance(each, Without)), ())
    if name in without:
        return Annotated[kind, Parameter(parse=False)]
    kind = next((each for each in meta if is_typeddict(each)), kind)
    if is_typeddict(kind) or dataclasses.is_dataclass(kind):
        return Annotated[_group(kind, without), Parameter(name="*")]
    option = option or option_of(hint)
    if option is None:
        return hint
    called = max(option.names or ("--" + name.replace("_", "-"),), key=len)
    alternatives = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    number = next((each for each in (int, float) if each in alternatives), None)
    section: dict[str, Any] = {"group": heading(option.group)} if option.group else {}
    told = Parameter(
        name=option.names or None,
        help=option.about,
        metavar=option.metavar,
        negative=None if option.negative else "",
        validator=lambda _, value: option.check(value, called),
        converter=None if number is None else partial(_number, number),
        show_default=False if kind is bool else None,
        **section,
    )
    return Annotated[kind, told]


def _number(kind: type[int] | type[float], _: Any, tokens: Any) -> int | float:
    """A number from the command line; Cyclopts itself would round 1.5 to a whole number."""
    try:
        return kind(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value!r} is no {'whole ' if kind is int else ''}number") from None


def _group(kind: Any, without: tuple[str, ...]) -> Any:
    """A dataclass whose fields Cyclopts reads as options, or a TypedDict of dials."""
    if is_typeddict(kind):
        dials = {name: DIALS[name] for name in kind.__annotations__ if name not in without}
        made = {name: _parameter(name, dial.kind | None, (), dial) for name, dial in dials.items()}
        return TypedDict(kind.__name__, made, total=False)  # type: ignore[operator]
    hints = get_type_hints(kind, include_extras=True)
    made = {name: _parameter(name, hint, without) for name, hint in hints.items()}
    # pickled as the class itself, since another process has not made this one
    names: dict[str, Any] = {"__annotations__": made, "__module__": kind.__module__}
    names["__reduce__"] = lambda group: (partial(kind, **vars(group)), ())
    return type(kind.__name__, (kind,), names)


def not_empty(prompt: str) -> None:
    """InputError where a prompt is blank."""
    if not prompt.strip():
        raise InputError(f'prompt {prompt!r} is empty; say what to draw, such as "a photo of a red tulip"')


# Options that several verbs share.
Prompt = Annotated[str, Option("What to draw.", metavar="PROMPT", validate=not_empty)]
Count = Annotated[int, Option("Pictures.", ge=1, le=10_000, names=("-n", "--n"))]
Seed = Annotated[
    int,
    Option(
        "Of the first picture; the next has the next seed.",
        ge=0,
        le=2**62,
        remedy="0 to 2**62",
        group="Sampling",
    ),
]
Output = Annotated[Path | None, Option("Where to write.", names=("-o", "--output"), metavar="FILE.png")]
Overwrite = Annotated[
    bool,
    Option(
        "Replace pictures that were drawn with other settings, and with -o any file.", group="Many pictures"
    ),
]
Json = Annotated[bool, Option("Print one JSON object and nothing else.", names=("--json",))]
Prompts = Annotated[
    Path | None, Option("One prompt per line; default: the model's own list.", metavar="FILE")
]
Plots = Annotated[bool | None, Option("PNG plots. Default: where matplotlib is installed.", negative=True)]


def folder(help: str) -> Option:
    """The option of a folder to write to."""
    return Option(help, names=("-o", "--output"), metavar="DIR")


def read(options: DrawOptions, pictures: bool = True) -> Pipeline:
    """Read the model; says on stderr what weights in 8 bits change. Raises InputError.

    pictures: refuse a model whose codes cannot become pictures here.
    """
    from lanternpp import Pipeline
    from lanternpp.api.results import check_output

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
