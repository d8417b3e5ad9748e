"""The options that several verbs share, each declared once, and what each may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lanternpp.errors import InputError

MODEL, METHOD = "nature-128", "auto"


def within(low: float, high: float = math.inf, remedy: str = "", above: bool = False) -> Callable[..., Any]:
    """A check that a number is finite and in [low, high], or in (low, high] with `above`."""

    def check(param: typer.CallbackParam, value: float | None) -> float | None:
        if value is None:
            return None
        fine = low < value <= high if above else low <= value <= high
        if not (fine and math.isfinite(value)):
            option = max(param.opts, key=len)
            raise InputError(f"{option} {value} is out of range; use {remedy}")
        return value

    return check


def not_empty(value: str) -> str:
    """A prompt that says something."""
    if not value.strip():
        raise InputError(f'prompt {value!r} is empty; say what to draw, such as "a photo of a red tulip"')
    return value


def not_empty_if_given(value: str | None) -> str | None:
    """A prompt that says something, or none."""
    return None if value is None else not_empty(value)


def known_method(value: str) -> str:
    """The name of a method."""
    from lanternpp.methods import check_method

    return check_method(value)


def method_names() -> list[str]:
    """For the help text."""
    from lanternpp.methods import METHODS

    return list(METHODS)


PANEL_MODEL, PANEL_METHOD, PANEL_SAMPLING, PANEL_QUALITY = "Model", "Method", "Sampling", "Quality"

Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="What to draw.", callback=not_empty)]
Count = Annotated[int, typer.Option("-n", "--n", help="Pictures.", callback=within(1, 10_000, "1 to 10000"))]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE.png", help="Where to write.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

Model = Annotated[
    str, typer.Option(metavar="NAME|DIR|HUB_ID", help="The target.", rich_help_panel=PANEL_MODEL)
]
Drafter = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|DIR|HUB_ID", help="Another drafter than the model's own.", rich_help_panel=PANEL_MODEL
    ),
]
Size = Annotated[
    str | None,
    typer.Option(
        metavar="WxH",
        help="Pixels, for a model that draws more than one size (Lumina-mGPT, Emu3).",
        rich_help_panel=PANEL_MODEL,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=PANEL_MODEL)]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto, float32, bfloat16, float16, float64, or int8: the target's weights in 8 bits (needs torchao).",
        rich_help_panel=PANEL_MODEL,
    ),
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Compile the passes (torch.compile); takes minutes before the first picture.",
        rich_help_panel=PANEL_MODEL,
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        help="Pictures drawn at once; default: all of them, at most 8 (compare: one).",
        callback=within(1, remedy="1 or more"),
        rich_help_panel=PANEL_MODEL,
    ),
]

Method = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"A proposer, a tree and an acceptance rule by name: {', '.join(method_names())}. auto takes what the model's "
        "own defaults or `lanternpp tune` say, else the fastest lossless one for the drafter that it has.",
        callback=known_method,
        rich_help_panel=PANEL_METHOD,
    ),
]
Proposer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Who guesses ahead, if not the method's: nothing, tree, parallel, independent or jacobi.",
        rich_help_panel=PANEL_METHOD,
    ),
]
Tree = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE.json|PATHS",
        help="Another draft tree than the method's.",
        rich_help_panel=PANEL_METHOD,
    ),
]
Accept = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Another acceptance rule than the method's.", rich_help_panel=PANEL_METHOD
    ),
]
Neighbours = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help="Codebook neighbours that may lend a code their probability.",
        callback=within(1, remedy="1 or more, below the number of codes"),
        rich_help_panel=PANEL_METHOD,
    ),
]
Delta = Annotated[
    float | None,
    typer.Option(
        metavar="D",
        help="LANTERN: the most probability neighbours may lend, 0 (exact) to 1. "
        "COOL-SD: the weight at the first level; 1 is exact. Cactus: the divergence a code may cost; 0 is exact. "
        "Mixture: the drafter's share, 0 (exact) to 1.",
        callback=within(0, remedy="0 or more"),
        rich_help_panel=PANEL_METHOD,
    ),
]
Lambda = Annotated[
    float | None,
    typer.Option(
        "--lambda",
        metavar="L",
        help="LANTERN++: a code may grow to L times its probability; 1 is exact.",
        callback=within(1, remedy="1 (exact) or more"),
        rich_help_panel=PANEL_METHOD,
    ),
]
Nu = Annotated[
    float | None,
    typer.Option(
        metavar="NU",
        help="Relaxed rules: how fast the relaxation falls with the level of the draft; 0 keeps it.",
        callback=within(0, remedy="0 (the same at every level) or more"),
        rich_help_panel=PANEL_METHOD,
    ),
]
Residual = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What a relaxed rule draws from after a refusal: paper or optimal.",
        rich_help_panel=PANEL_METHOD,
    ),
]
Window = Annotated[
    int | None,
    typer.Option(
        metavar="W",
        help="Jacobi: guesses looked at in every pass.",
        callback=within(1, remedy="1 to 256"),
        rich_help_panel=PANEL_METHOD,
    ),
]
Coupling = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Jacobi: how a guess follows its last one: none, maximal or gumbel.",
        rich_help_panel=PANEL_METHOD,
    ),
]
Fresh = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Jacobi: what a first guess is drawn from: uniform, last, above or mixed.",
        rich_help_panel=PANEL_METHOD,
    ),
]
Verify = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How a draft is verified: token (a walk that ends at the first refusal) or block (a whole chain at once); "
        "default: the best that the draft allows.",
        rich_help_panel=PANEL_METHOD,
    ),
]
Measure = Annotated[
    bool | None,
    typer.Option(
        "--measure/--no-measure",
        help="Measure the total variation that a relaxed rule spends; takes time of its own.",
        rich_help_panel=PANEL_METHOD,
    ),
]

Cfg = Annotated[
    float | None,
    typer.Option(
        help="Classifier-free guidance; 1 is none.",
        callback=within(1, remedy="1 (no guidance) or more"),
        rich_help_panel=PANEL_SAMPLING,
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="0 is greedy.", callback=within(0, remedy="0 (greedy) or more"), rich_help_panel=PANEL_SAMPLING
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Keep the K most probable codes; 0 keeps all.",
        callback=within(0, remedy="0 (all codes) or more"),
        rich_help_panel=PANEL_SAMPLING,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Keep the most probable codes up to this mass; 1 keeps all.",
        callback=within(0, 1, "above 0, at most 1 (all codes)", above=True),
        rich_help_panel=PANEL_SAMPLING,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        help="Of the first picture; the next has the next seed.",
        callback=within(0, 2**62, "0 to 2**62"),
        rich_help_panel=PANEL_SAMPLING,
    ),
]

Reference = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Pictures to compare with, an imagefolder's val/ where it has one; default: the model's own "
        "features of its validation photos.",
        rich_help_panel=PANEL_QUALITY,
    ),
]
Features = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What sees the pictures: judge (the model's own, the default), inception, or module:Class.",
        rich_help_panel=PANEL_QUALITY,
    ),
]
Clip = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|HUB_ID",
        help="Also the CLIP score, by this CLIP model.",
        rich_help_panel=PANEL_QUALITY,
    ),
]
