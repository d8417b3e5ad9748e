"""The page at /: plain decoding and a method draw the same picture side by side in a browser.

The page is a few static files, which are the same on every server, and /page/setup, which describes this one. It uses the
server's API as any other client does: a race is two streamed requests of /v1/images/generations, and the server keeps
nothing of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lanternpp.accept import RULES
from lanternpp.api.options import BASELINE, DIALS, METHODS, Dial, SamplingDials, Settings, names
from lanternpp.api.pipeline import Pipeline
from lanternpp.api.results import grid
from lanternpp.api.settings import dials_read, greatest, part
from lanternpp.errors import InputError
from lanternpp.evaluation.prompts import PROMPTS, read_prompts
from lanternpp.serve.config import ServerConfig
from lanternpp.serve.request_mapping import picture_size
from lanternpp.trees import TREES

FOLDER = Path(__file__).parent
SCRIPTS = ("api.js", "dial.js", "page.js", "side.js")
FILES = {  # path -> file and its type; served without a key, since the page asks for the key itself
    "/": ("index.html", "text/html"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/page/{name}": (name, "text/javascript") for name in SCRIPTS},
}
POLICY = (  # scripts and styles only from files of the server; pictures from its answers, as blobs
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)

EXAMPLES = 5  # prompts

SHOWN = tuple(dial for dial in DIALS.values() if dial.label)
# Rules without dials.
WITHOUT_DIALS = tuple(name for name, rule in RULES.items() if getattr(rule, "dials", None) == frozenset())


def routes(pipe: Pipeline, config: ServerConfig) -> list[Route]:
    """The routes of the page for a model; /page/setup is what it shows, as JSON."""
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
    answers: dict[str, Response] = {"/page/setup": JSONResponse(setup(pipe, config))}
    for path, (name, kind) in FILES.items():
        answers[path] = Response((FOLDER / name).read_bytes(), media_type=kind, headers=headers)
    return [Route(path, answer, methods=["GET"]) for path, answer in answers.items()]


def setup(pipe: Pipeline, config: ServerConfig) -> dict[str, Any]:
    """All of it as a JSON object.

    `columns` and `rows` count the codes of a picture; `width` is `columns` and, where a row ends with codes that are not
    drawn, those too.
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
        "methods": {name: shown(pipe, config, name) for name in offered},
        "dials": [row(pipe, dial) for dial in SHOWN],
    }


def row(pipe: Pipeline, dial: Dial) -> dict[str, Any]:
    """A dial on the page: a number within a range, or one of `choices`. more: whether it is under "More dials"."""
    low, high, step = dial.slider
    shown = {"name": dial.name, "label": dial.label, "info": dial.help, "choices": choices(pipe, dial)}
    return shown | {"low": low, "high": high, "step": step, "more": dial.folded}


def choices(pipe: Pipeline, dial: Dial) -> tuple[str, ...]:
    """The values that the page offers for a dial on this model; empty for a number."""
    if dial.name != "tree":
        return WITHOUT_DIALS if dial.name == "accept" else dial.choices
    latents = pipe.target.channels
    return tuple(tree for tree in TREES if not latents or pipe.can_draft(pipe.settings("eagle", tree=tree)))


def shown(pipe: Pipeline, config: ServerConfig, method: str) -> dict[str, Any]:
    """A method: a sentence about it, and the values of its sampling and of the dials that it reads."""
    settings = config.settings(pipe, method, {})
    about = METHODS[method].about
    return {
        "about": f"{about[:1].upper()}{about[1:]}.",
        "dials": {
            dial.name: _value(pipe, dial, settings) for dial in SHOWN if dial.name in _read(pipe, settings)
        },
        "limits": limits(pipe, settings),
        "sampling": {name: getattr(settings, name) for name in names(SamplingDials)},
    }


def limits(pipe: Pipeline, settings: Settings) -> dict[str, tuple[float, float]]:
    """The least and greatest values of the dials for which these differ from those of `row`, on this model with these settings."""
    sliders = {name: (DIALS[name].slider, most) for name, most in greatest(pipe.target).items()}
    found = {name: (low, min(high, most)) for name, ((low, high, _), most) in sliders.items()}
    latents = {"temperature": (0.05, 2)} if pipe.target.channels else {}  # these cannot be greedy
    return found | latents | part("accept", settings.accept).sliders


def methods(pipe: Pipeline, config: ServerConfig) -> list[str]:
    """The drafting methods for which this model has the network."""
    return [name for name in METHODS if name != BASELINE and _possible(pipe, config, name)]


def _possible(pipe: Pipeline, config: ServerConfig, method: str) -> bool:
    """Whether this model has the parts that a method needs: a drafter, or a codebook for a rule of neighbours."""
    try:
        settings = config.settings(pipe, method, {})
    except InputError:
        return False
    return pipe.can_draft(settings)


def _read(pipe: Pipeline, settings: Settings) -> frozenset[str]:
    """The dials that have an effect with these settings; the rule, where the model may be drawn with several that have no dials."""
    rules = [rule for rule in WITHOUT_DIALS if pipe.can_draft(replace(settings, accept=rule))]
    choice = {"accept"} if len(rules) > 1 and settings.accept in rules else set()
    return dials_read(settings.proposer, settings.accept) | choice | frozenset(names(SamplingDials))


def _value(pipe: Pipeline, dial: Dial, settings: Settings) -> float | str | None:
    """The value that a dial shows; None: the value has no name, such as a tree that was tuned."""
    value = getattr(settings, dial.name)
    known = choices(pipe, dial)
    return None if known and value not in known else value


def examples(pipe: Pipeline) -> list[str]:
    """A few short prompts, evenly spread over the list that comes with the model."""
    if not (pipe.folder / PROMPTS).is_file():
        return list(pipe.target.conditions[:EXAMPLES])
    prompts = read_prompts(None, pipe.folder)[::-1]
    step = max(1, len(prompts) // EXAMPLES)
    parts = [prompts[i : i + step] for i in range(0, len(prompts), step)]
    return [min(part, key=len) for part in parts][:EXAMPLES]
