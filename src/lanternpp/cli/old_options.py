"""The options of verbs that are still made by Typer."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lanternpp.api.options import AUTO, METHODS, Dial, check_method
from lanternpp.errors import InputError
from lanternpp.util.options import Option

MODEL, METHOD = "nature-128", AUTO


def within(low: float, high: float = math.inf, remedy: str = "", above: bool = False) -> Callable[..., Any]:
    """A check that a number is in a range."""
    option = Option(
        "",
        gt=low if above else None,
        ge=None if above else low,
        le=None if high == math.inf else high,
        remedy=remedy,
    )

    def check(param: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None:
            option.check(value, max(param.opts, key=len))
        return value

    return check


def not_empty(value: str | None) -> str | None:
    """The prompt, unchanged. Raises InputError where it is blank."""
    if value is not None and not value.strip():
        raise InputError(f'prompt {value!r} is empty; say what to draw, such as "a photo of a red tulip"')
    return value


def bundled(
    argument: str, options: Mapping[str, tuple[Any, Any]], make: Callable[..., Any]
) -> Callable[..., Any]:
    """A decorator that replaces one argument of a verb by several options of the command line.

    options: annotation and default of each option, by name. make: called with their values, gives the argument's value.
    The options take the argument's place in the help.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def run(**given: Any) -> None:
            value = make(**{name: given.pop(name) for name in options})
            verb(**given, **{argument: value})

        keyword = inspect.Parameter.KEYWORD_ONLY
        declared: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(verb, eval_str=True).parameters.items():
            if name != argument:
                declared.append(parameter.replace(kind=keyword))
                continue
            for each, (kind, default) in options.items():
                declared.append(inspect.Parameter(each, keyword, default=default, annotation=kind))
        run.__signature__ = inspect.Signature(declared)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in declared}
        return run

    return decorate


PANEL_METHOD, PANEL_QUALITY = "Method", "Quality"


def dial_option(dial: Dial) -> Any:
    """The option of a dial; its value is None where it is not given."""
    flags = f"{dial.option}/{dial.option.replace('--', '--no-', 1)}" if dial.kind is bool else dial.option

    def check(param: typer.CallbackParam, value: Any) -> Any:
        dial.check(value, dial.option)
        return value

    return typer.Option(
        None, flags, metavar=dial.metavar, help=dial.about, callback=check, rich_help_panel=dial.group
    )


_model = partial(typer.Option, rich_help_panel="Model")
_quality = partial(typer.Option, rich_help_panel=PANEL_QUALITY)

Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="What to draw.", callback=not_empty)]
Count = Annotated[int, typer.Option("-n", "--n", help="Pictures.", callback=within(1, 10_000))]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE.png", help="Where to write.")]
to_folder = partial(typer.Option, "-o", "--output", metavar="DIR")
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Prompts = Annotated[
    Path | None, typer.Option(metavar="FILE", help="One prompt per line; default: the model's own list.")
]

Model = Annotated[str, _model(metavar="NAME|DIR|HUB_ID", help="The target.")]
Drafter = Annotated[
    str | None, _model(metavar="NAME|DIR|HUB_ID", help="Another drafter than the model's own.")
]
Size = Annotated[
    str | None,
    _model(metavar="WxH", help="Pixels, for a model that draws more than one size (Lumina-mGPT, Emu3)."),
]
Device = Annotated[str, _model(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[
    str,
    _model(
        help="auto, float32, bfloat16, float16, float64, or int8: the target's weights in 8 bits (auto's choice on a CPU; a GPU needs torchao)."
    ),
]
Method = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"A proposer, a tree and an acceptance rule by name: {', '.join(METHODS)}. auto takes what the model's "
        "own defaults or `lanternpp tune` say, else the fastest lossless one for the drafter that it has.",
        callback=check_method,
        rich_help_panel=PANEL_METHOD,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        help="Of the first picture; the next has the next seed.",
        callback=within(0, 2**62, "0 to 2**62"),
        rich_help_panel="Sampling",
    ),
]

Reference = Annotated[
    Path | None,
    _quality(
        metavar="DIR",
        help="Pictures to compare with, an imagefolder's val/ where it has one; default: the model's own "
        "features of its validation photos.",
    ),
]
Features = Annotated[
    str | None,
    _quality(
        metavar="NAME",
        help="The network whose features are compared: classifier (the model's own classifier, the default), inception, or module:Class.",
    ),
]
Clip = Annotated[str | None, _quality(metavar="DIR|HUB_ID", help="Also the CLIP score, by this CLIP model.")]

ray_option = partial(typer.Option, rich_help_panel="Ray")
Ray = Annotated[
    str | None,
    ray_option(
        "--ray",
        metavar="[local|auto|HOST:PORT]",
        help="Use Ray: on this machine (local, the default), on the cluster that it is part of (auto), or on the one at "
        "an address. Needs lanternpp\\[ray].",
    ),
]
