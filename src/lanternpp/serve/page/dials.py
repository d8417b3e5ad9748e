"""What the page lets you set: methods of this model, their dials, and the checks of what came from outside."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lanternpp.accept.base import RESIDUALS
from lanternpp.errors import InputError
from lanternpp.methods import METHODS
from lanternpp.pipeline import Pipeline
from lanternpp.proposers.jacobi import COUPLINGS, FRESH
from lanternpp.registry import unknown
from lanternpp.serve.terms import Terms
from lanternpp.settings import Settings, dials_read
from lanternpp.targets.base import Target
from lanternpp.trees import TREES

COUNT = 4  # pictures of a side, at most
SEEDS = 2**53  # a browser's numbers are exact up to here
OWN = ""  # of a choice that is left to the method


@dataclass(frozen=True)
class Dial:
    """A field of `Settings` that the page shows: a number of a range, or one of `choices`."""

    name: str
    label: str
    info: str
    low: float = 0.0
    high: float = 1.0
    step: float = 0.01
    choices: tuple[str, ...] = ()

    def offers(self, value: object) -> list[tuple[str, str]]:
        """Label and value of each choice, where the method's own is `value`; None: left to the method."""
        made = [(choice, choice) for choice in self.choices]
        if value is None:
            return [("the method's own", OWN), *made]
        if isinstance(value, str) and value not in self.choices:
            return [(value if len(value) < 32 else "the method's own", value), *made]  # a tuned tree is long
        return made

    def check(self, value: object, also: object = None) -> float | int | str:
        """The value, if it can be set so; `also` is a choice beside those listed. InputError says what can."""
        if self.choices:
            known = [*self.choices, *([also] if isinstance(also, str) and also not in self.choices else [])]
            if not isinstance(value, str) or value not in known:
                raise InputError(unknown(self.label, str(value)[:80], known))
            return value
        return number(self.label, value, self.low, self.high, whole=self.step == 1)


DIALS = (
    Dial("lam", "Lambda", "How far a code's probability may grow; 1 is exact.", 1, 20, 0.1),
    Dial("delta", "Delta", "How much a code may borrow.", 0, 3),
    Dial("neighbours", "Neighbours k", "Look-alike codes that may lend.", 1, 1000, 1),
    Dial("nu", "Nu", "How fast the weight falls with the level.", 0, 2),
    Dial("window", "Window", "Guesses in one pass.", 1, 64, 1),
    Dial("tree", "Tree", "The shape of a draft.", choices=tuple(TREES)),
    Dial("coupling", "Coupling", "How a guess follows the last one.", choices=tuple(COUPLINGS)),
    Dial("fresh", "Fresh guesses", "What new guesses are drawn from.", choices=tuple(FRESH)),
    Dial("residual", "Residual", "What is drawn from after a refusal.", choices=RESIDUALS),
)
CFG = Dial("cfg", "Guidance", "How closely to follow the prompt.", 1, 15, 0.1)
TEMPERATURE = Dial("temperature", "Temperature", "0 takes the most probable code.", 0, 2, 0.05)


def number(label: str, value: object, low: float, high: float, whole: bool = False) -> float | int:
    """A finite number in [low, high]; InputError says what is right."""
    given = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not low <= given <= high or (whole and given != int(given)):
        kind = "a whole number" if whole else "a number"
        raise InputError(f"{label} {str(value)[:80]!r} cannot be set; use {kind} from {low:g} to {high:.16g}")
    return int(given) if whole else float(given)


def baseline() -> str:
    """The method without a draft: plain autoregressive decoding."""
    return next(name for name, row in METHODS.items() if row.proposer == "nothing")


def methods(pipe: Pipeline, terms: Terms) -> list[str]:
    """The methods that draft and whose network this model has."""
    drafting = [name for name in METHODS if name != baseline()]
    return [name for name in drafting if _possible(pipe, terms, name)]


def _possible(pipe: Pipeline, terms: Terms, method: str) -> bool:
    """Whether a method's parts are there; a rule of neighbours needs a codebook."""
    try:
        settings = terms.settings(pipe, method, {})
    except InputError:
        return False
    return pipe.can_draft(settings)


def read(settings: Settings) -> list[Dial]:
    """The dials of the page that these settings' parts read."""
    named = dials_read(settings.proposer, settings.accept)
    return [dial for dial in DIALS if dial.name in named]


def grid(target: Target, size: tuple[int, int]) -> tuple[int, int]:
    """Columns and rows of codes in a picture of this size in pixels; a code that ends a row is no column."""
    rows = target.length // target.width
    width, height = size
    return min(target.width, round(rows * width / height)), rows


@dataclass(frozen=True)
class Wish:
    """What a race is run with."""

    prompt: str
    seeds: tuple[int, ...]
    base: Settings  # of plain decoding
    side: Settings  # of the method


def wish(
    pipe: Pipeline,
    terms: Terms,
    offered: Sequence[str],
    prompt: object,
    method: object,
    seed: object,
    count: object,
    measure: object,
    dials: Mapping[str, object],
) -> Wish:
    """The race that someone asks for, checked as if it came from a stranger: it may. Raises InputError.

    Only dials that the method reads are looked at; an empty one is the method's own.
    """
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError('the prompt is empty; say what to draw, such as "a photo of a red tulip"')
    if len(prompt) > terms.prompt:
        raise InputError(f"the prompt has {len(prompt)} characters; use at most {terms.prompt}")
    if not isinstance(method, str) or method not in offered:
        raise InputError(unknown("method", str(method)[:80], offered))
    n = int(number("Pictures", count, 1, COUNT, whole=True))
    first = int(number("Seed", seed, 0, SEEDS, whole=True))
    own = terms.settings(pipe, method, {})
    given: dict[str, Any] = {
        dial.name: dial.check(dials[dial.name], getattr(own, dial.name))
        for dial in (*read(own), CFG, TEMPERATURE)
        if dials.get(dial.name) not in (None, OWN)
    }
    side = terms.settings(pipe, method, given | {"measure": bool(measure)})
    same = {name: getattr(side, name) for name in ("cfg", "temperature", "top_k", "top_p", "compile")}
    base = terms.settings(pipe, baseline(), same | {"measure": False})
    return Wish(prompt.strip(), tuple(range(first, first + n)), base, side)
