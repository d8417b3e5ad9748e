"""What the page shows of a model: its methods, their dials, prompts to begin with, and the words it knows."""

from __future__ import annotations

from typing import Any

from lanternpp.dials import EVERY, SAMPLING, Dial, dials, names
from lanternpp.errors import InputError
from lanternpp.evaluation.prompts import PROMPTS, read_prompts
from lanternpp.methods import BASELINE, METHODS
from lanternpp.pipeline import Pipeline
from lanternpp.serve.pictures import picture_size
from lanternpp.serve.terms import Terms
from lanternpp.settings import Settings, dials_read
from lanternpp.targets.base import Target
from lanternpp.trees import TREES

EXAMPLES = 5  # prompts offered


DIALS = tuple(dial for dial in dials(*EVERY) if dial.label)


def setup(pipe: Pipeline, terms: Terms) -> dict[str, Any]:
    """All of it, as JSON can say it. `columns` and `rows` are of codes; `width` counts those that end a row too."""
    offered = methods(pipe, terms)
    own = (pipe.chosen(terms.method).method, pipe.chosen().method)
    columns, rows = grid(pipe.target, picture_size(pipe))
    return {
        "model": pipe.name,
        "length": pipe.target.length,
        "width": pipe.target.width,
        "columns": columns,
        "rows": rows,
        "prompt": terms.prompt,
        "keys": bool(terms.keys),
        "examples": examples(pipe),
        "words": {kind: list(words) for kind, words in pipe.target.words.items()},
        "baseline": BASELINE,
        "method": next(name for name in (*own, *offered) if name in offered),
        "methods": {name: shown(pipe, terms, name) for name in offered},
        "dials": [row(dial) for dial in DIALS],
    }


def row(dial: Dial) -> dict[str, Any]:
    """A field of a request that the page shows: a number of a range, or one of `choices`; more: under More dials."""
    low, high, step = dial.slider
    shown = {"name": dial.name, "label": dial.label, "info": dial.help, "choices": choices(dial)}
    return shown | {"low": low, "high": high, "step": step, "more": dial.folded}


def choices(dial: Dial) -> tuple[str, ...]:
    """The names that a dial may have on the page."""
    return tuple(TREES) if dial.name == "tree" else dial.choices


def shown(pipe: Pipeline, terms: Terms, method: str) -> dict[str, Any]:
    """A method: a sentence on it, the values of its dials, and of the sampling. A dial it does not read is left out."""
    settings = terms.settings(pipe, method, {})
    about = METHODS[method].about
    return {
        "about": f"{about[:1].upper()}{about[1:]}.",
        "dials": {dial.name: _value(dial, settings) for dial in DIALS if dial.name in _read(settings)},
        "sampling": {name: getattr(settings, name) for name in names(SAMPLING)},
    }


def methods(pipe: Pipeline, terms: Terms) -> list[str]:
    """The methods that draft and whose network this model has."""
    return [name for name in METHODS if name != BASELINE and _possible(pipe, terms, name)]


def _possible(pipe: Pipeline, terms: Terms, method: str) -> bool:
    """Whether a method's parts are there; a rule of neighbours needs a codebook."""
    try:
        settings = terms.settings(pipe, method, {})
    except InputError:
        return False
    return pipe.can_draft(settings)


def _read(settings: Settings) -> frozenset[str]:
    """The fields of a request that change what these settings draw."""
    return dials_read(settings.proposer, settings.accept) | frozenset(names(SAMPLING))


def _value(dial: Dial, settings: Settings) -> float | str | None:
    """What a dial shows; None: what the method has cannot be named, such as a tree that was tuned."""
    value = getattr(settings, dial.name)
    known = choices(dial)
    return None if known and value not in known else value


def grid(target: Target, size: tuple[int, int]) -> tuple[int, int]:
    """Columns and rows of codes in a picture of this size in pixels; a code that ends a row is no column."""
    rows = target.length // target.width
    width, height = size
    return min(target.width, round(rows * width / height)), rows


def examples(pipe: Pipeline) -> list[str]:
    """A few prompts that the model brings, from all over its list, short ones."""
    if not (pipe.folder / PROMPTS).is_file():
        return list(pipe.target.conditions[:EXAMPLES])
    prompts = read_prompts(None, pipe.folder)[::-1]
    step = max(1, len(prompts) // EXAMPLES)
    parts = [prompts[i : i + step] for i in range(0, len(prompts), step)]
    return [min(part, key=len) for part in parts][:EXAMPLES]
