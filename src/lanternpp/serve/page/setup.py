"""What the page shows of a model: its methods, their dials, prompts to begin with, and the words it knows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lanternpp.accept.base import RESIDUALS
from lanternpp.engine.verifiers import VERIFIERS
from lanternpp.errors import InputError
from lanternpp.evaluation.prompts import PROMPTS, read_prompts
from lanternpp.methods import METHODS
from lanternpp.pipeline import Pipeline
from lanternpp.proposers.jacobi import COUPLINGS, FRESH
from lanternpp.serve.pictures import picture_size
from lanternpp.serve.terms import Terms
from lanternpp.settings import Settings, dials_read
from lanternpp.targets.base import Target
from lanternpp.trees import TREES

EXAMPLES = 5  # prompts offered


@dataclass(frozen=True)
class Dial:
    """A field of a request that the page shows: a number of a range, or one of `choices`."""

    name: str
    label: str
    info: str
    low: float = 0.0
    high: float = 1.0
    step: float = 0.01
    choices: tuple[str, ...] = ()
    more: bool = False  # whether it stands under More dials


DIALS = (
    Dial("lam", "Lambda", "How far a code's probability may grow; 1 is exact.", 1, 20, 0.1),
    Dial("delta", "Delta", "How much a code may borrow.", 0, 3),
    Dial("neighbours", "Neighbours k", "Look-alike codes that may lend.", 1, 1000, 1),
    Dial("nu", "Nu", "How fast the relaxation falls with the level.", 0, 2),
    Dial("window", "Window", "Guesses in one pass.", 1, 64, 1),
    Dial("cfg", "Guidance", "How closely to follow the prompt.", 1, 15, 0.1),
    Dial("tree", "Tree", "The shape of a draft.", choices=tuple(TREES), more=True),
    Dial("coupling", "Coupling", "How a guess follows the last one.", choices=tuple(COUPLINGS), more=True),
    Dial("fresh", "Fresh guesses", "What new guesses are drawn from.", choices=tuple(FRESH), more=True),
    Dial("residual", "Residual", "What is drawn from after a refusal.", choices=RESIDUALS, more=True),
    Dial("verify", "Verification", "How a draft is verified.", choices=tuple(VERIFIERS), more=True),
    Dial("temperature", "Temperature", "0 takes the most probable code.", 0, 2, 0.05, more=True),
)
SAMPLING = ("cfg", "temperature", "top_k", "top_p")  # the same on both sides of a race


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
        "baseline": baseline(),
        "method": next(name for name in (*own, *offered) if name in offered),
        "methods": {name: shown(pipe, terms, name) for name in offered},
        "dials": [asdict(dial) for dial in DIALS],
    }


def shown(pipe: Pipeline, terms: Terms, method: str) -> dict[str, Any]:
    """A method: a sentence on it, the values of its dials, and of the sampling. A dial it does not read is left out."""
    settings = terms.settings(pipe, method, {})
    about = METHODS[method].about
    return {
        "about": f"{about[:1].upper()}{about[1:]}.",
        "dials": {dial.name: _value(dial, settings) for dial in DIALS if dial.name in _read(settings)},
        "sampling": {name: getattr(settings, name) for name in SAMPLING},
    }


def baseline() -> str:
    """The method without a draft: plain autoregressive decoding."""
    return next(name for name, row in METHODS.items() if row.proposer == "nothing")


def methods(pipe: Pipeline, terms: Terms) -> list[str]:
    """The methods that draft and whose network this model has."""
    return [name for name in METHODS if name != baseline() and _possible(pipe, terms, name)]


def _possible(pipe: Pipeline, terms: Terms, method: str) -> bool:
    """Whether a method's parts are there; a rule of neighbours needs a codebook."""
    try:
        settings = terms.settings(pipe, method, {})
    except InputError:
        return False
    return pipe.can_draft(settings)


def _read(settings: Settings) -> frozenset[str]:
    """The fields of a request that change what these settings draw."""
    return dials_read(settings.proposer, settings.accept) | frozenset(SAMPLING)


def _value(dial: Dial, settings: Settings) -> float | str | None:
    """What a dial shows; None: what the method has cannot be named, such as a tree that was tuned."""
    value = getattr(settings, dial.name)
    return None if dial.choices and value not in dial.choices else value


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
