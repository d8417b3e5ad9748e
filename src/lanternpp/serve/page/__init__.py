"""The page at /: plain decoding and a method draw the same picture side by side in a browser.

The page is a few static files, which are the same on every server, and /page/setup, which describes this server. The page
uses the server's API as any other client does: a race is two streamed requests of /v1/images/generations, and the server
keeps no pictures.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lanternpp.accept import RULES
from lanternpp.api.options import BASELINE, DIALS, METHODS, Dial, SamplingDials, Settings, names
from lanternpp.api.pipeline import Pipeline
from lanternpp.api.results import grid
from lanternpp.api.settings import dial_limits, dials_read, part
from lanternpp.errors import InputError
from lanternpp.evaluation.prompts import PROMPTS, read_prompts
from lanternpp.serve.config import ServerConfig
from lanternpp.serve.request_mapping import picture_size
from lanternpp.trees import TREES

FOLDER = Path(__file__).parent
FILES = {  # path -> file and its type; served without a key, since the page asks for the key itself
    "/": ("index.html", "text/html"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/page/{name}": (name, "text/javascript") for name in ("api.js", "dial.js", "page.js", "side.js")},
}
POLICY = (  # scripts and styles only from files of the server; pictures from its answers, as blobs
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)

MAX_EXAMPLES = 5  # prompts
PAGE_DIALS = tuple(dial for dial in DIALS.values() if dial.label)
RULES_WITHOUT_DIALS = tuple(name for name in RULES if getattr(RULES[name], "dials", None) == frozenset())


def routes(pipe: Pipeline, config: ServerConfig) -> list[Route]:
    """Build the routes of the page for a model."""
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
    responses: dict[str, Response] = {"/page/setup": JSONResponse(setup(pipe, config))}
    for path, (name, media_type) in FILES.items():
        responses[path] = Response((FOLDER / name).read_bytes(), media_type=media_type, headers=headers)
    return [Route(path, response, methods=["GET"]) for path, response in responses.items()]


def setup(pipe: Pipeline, config: ServerConfig) -> dict[str, Any]:
    """Describe the server and its model for the page, as a JSON object.

    `columns` and `rows` count the codes that are drawn; `width` counts all codes of a row, also those that only end the row.
    """
    offered = methods(pipe, config)
    preferred = (pipe.chosen(config.method).method, pipe.chosen().method)
    columns, rows = grid(pipe.target, picture_size(pipe))
    return {
        "model": pipe.name,
        "length": pipe.target.length,
        "width": pipe.target.width,
        "columns": columns,
        "rows": rows,
        "prompt": config.prompt_limit,
        "keys": bool(config.keys),
        "examples": examples(pipe),
        "words": {kind: list(words) for kind, words in pipe.target.words.items()},
        "baseline": BASELINE,
        "method": next(name for name in (*preferred, *offered) if name in offered),
        "methods": {name: method_row(pipe, name, settings) for name, settings in offered.items()},
        "dials": [dial_row(pipe, dial) for dial in PAGE_DIALS],
    }


def methods(pipe: Pipeline, config: ServerConfig) -> dict[str, Settings]:
    """Return the drafting methods for which this model has the parts, a network or a codebook, with their settings."""
    offered = {}
    for name in METHODS:
        with suppress(InputError):
            settings = config.settings(pipe, name, {})
            if name != BASELINE and pipe.can_draft(settings):
                offered[name] = settings
    return offered


def dial_row(pipe: Pipeline, dial: Dial) -> dict[str, Any]:
    """Describe a dial: a number within a range, or one of `choices`. more: whether the page puts it under "More dials"."""
    low, high, step = dial.slider
    row = {"name": dial.name, "label": dial.label, "info": dial.help, "choices": choices(pipe, dial)}
    return row | {"low": low, "high": high, "step": step, "more": dial.folded}


def choices(pipe: Pipeline, dial: Dial) -> tuple[str, ...]:
    """Return the values that the page offers for a dial on this model; empty for a number."""
    if dial.name != "tree":
        return RULES_WITHOUT_DIALS if dial.name == "accept" else dial.choices
    latents = pipe.target.channels
    return tuple(tree for tree in TREES if not latents or pipe.can_draft(pipe.settings("eagle", tree=tree)))


def method_row(pipe: Pipeline, method: str, settings: Settings) -> dict[str, Any]:
    """Describe a method: a sentence about it, the values of its sampling, and those of the dials that have an effect.

    "accept" is one of these dials if several rules without dials fit the model. None: the value has no name, such as a tree that
    was tuned.
    """
    about, sampling = METHODS[method].about, names(SamplingDials)
    rules = [rule for rule in RULES_WITHOUT_DIALS if pipe.can_draft(replace(settings, accept=rule))]
    effective = {*dials_read(settings.proposer, settings.accept), *sampling}
    if len(rules) > 1 and settings.accept in rules:
        effective.add("accept")
    values: dict[str, Any] = {}
    for dial in PAGE_DIALS:
        if dial.name in effective:
            value, offered = getattr(settings, dial.name), choices(pipe, dial)
            values[dial.name] = None if offered and value not in offered else value
    return {
        "about": f"{about[:1].upper()}{about[1:]}.",
        "dials": values,
        "limits": limits(pipe, settings),
        "sampling": {name: getattr(settings, name) for name in sampling},
    }


def limits(pipe: Pipeline, settings: Settings) -> dict[str, tuple[float, float]]:
    """Return (low, high) of the dials whose range on this model with these settings is not the range in `dial_row`."""
    ranges: dict[str, tuple[float, float]] = {}
    for name, max_value in dial_limits(pipe.target).items():
        low, high, _ = DIALS[name].slider
        ranges[name] = low, min(high, max_value)
    if pipe.target.channels:
        ranges["temperature"] = 0.05, 2  # continuous latents cannot be drawn greedily
    return ranges | part("accept", settings.accept).sliders


def examples(pipe: Pipeline) -> list[str]:
    """Choose a few short prompts, evenly spread over the list that comes with the model."""
    if not (pipe.folder / PROMPTS).is_file():
        return list(pipe.target.conditions[:MAX_EXAMPLES])
    prompts = read_prompts(None, pipe.folder)[::-1]
    step = max(1, len(prompts) // MAX_EXAMPLES)
    groups = [prompts[i : i + step] for i in range(0, len(prompts), step)]
    return [min(group, key=len) for group in groups][:MAX_EXAMPLES]
