"""The strengths at which relaxed rules spend the same total variation, so that what they buy with it can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lanternpp.api.options import DIALS
from lanternpp.api.pipeline import Pipeline, versions
from lanternpp.errors import InputError
from lanternpp.evaluation.draw import draw, evaluation_requests
from lanternpp.evaluation.speed import Entry
from lanternpp.tuning.budget import last_accepted
from lanternpp.tuning.journal import Journal

STRENGTHS = {  # the dial of each rule, its exact value, and the greatest that is tried
    "lantern": ("delta", 0.0, 1.0),
    "lantern++": ("lam", 1.0, 100.0),
    "cool": ("delta", 1.0, 100.0),
    "cactus": ("delta", 0.0, 10.0),
    "mixture": ("delta", 0.0, 1.0),
}
STEPS, RANGE = (
    400,
    1e7,
)  # values of a dial that are tried, and how many times greater the last is than the first


@dataclass(frozen=True)
class Strength:
    """An entry at the strength that was found for it."""

    entry: Entry
    budget: float
    spent: float  # total variation per code, measured, at most the budget


class StrengthSearch:
    """Measures what entries of a race spend, over some pictures, and finds their strengths by bisection.

    shared: dials of all entries. What is measured is kept in the folder, and not measured again. Raises InputError where the folder
    holds something else.
    """

    def __init__(
        self,
        pipe: Pipeline,
        prompts: Sequence[str],
        pictures: int,
        seed: int,
        shared: Mapping[str, Any],
        folder: Path,
    ):
        for prompt in prompts:
            pipe.target.check(prompt)
        self.pipe, self.shared = pipe, dict(shared)
        self.requests = evaluation_requests(prompts, pictures, seed + 2000)
        facts = {"tuned": "strengths", "model": pipe.name, "weights": pipe.weights, "prompts": list(prompts)}
        where = {"device": pipe.device.type, "dtype": pipe.dtype, "versions": versions()}
        self.journal = Journal(
            folder, {**facts, **where, "pictures": pictures, "seed": seed, "shared": self.shared}
        )

    def dial(self, entry: Entry) -> tuple[str, float, float]:
        """The dial that is an entry's strength, as in `STRENGTHS`. InputError where it has none, or gives it."""
        rule = str(self.pipe.settings(entry.method, **(self.shared | entry.overrides)).accept)
        if rule not in STRENGTHS:
            raise InputError(
                f"{entry.label!r} has the rule {rule!r}, whose strength is not known; use one of {', '.join(STRENGTHS)}"
            )
        name, exact, most = STRENGTHS[rule]
        if name in entry.overrides:
            raise InputError(
                f"{entry.label!r} gives {DIALS[name].spoken}, which is what equal variation finds; leave it out"
            )
        return name, exact, most

    def find(self, entry: Entry, budget: float) -> Strength | None:
        """The greatest strength of an entry that spends at most so much per code; None where the least spends more.

        The strength is that of the last of `STEPS` values in a geometric row, a few percent apart.
        """
        name, exact, most = self.dial(entry)
        steps = [(most - exact) * RANGE ** (place / (STEPS - 1) - 1) for place in range(STEPS)]
        field = [self._at(entry, name, round(exact + float(f"{step:.3g}"), 12)) for step in steps]
        last = last_accepted(range(STEPS), lambda place: self.spent(field[int(place)]) <= budget)
        if last is None:
            return None
        return Strength(field[last], budget, self.spent(field[last]))

    def spent(self, entry: Entry) -> float:
        """Total variation per code, the mean over pictures."""

        def measure() -> float:
            given = self.shared | entry.overrides | {"measure_tv": True}
            drawn = [result.stats for _, result in draw(self.pipe, self.requests, entry.method, **given)]
            self.pipe.release()
            values = [value for stats in drawn for value in stats.tv_cost_per_image]
            return fmean(values) / self.pipe.target.length

        return float(self.journal.once({"label": entry.label}, measure))

    @staticmethod
    def _at(entry: Entry, name: str, value: float) -> Entry:
        """An entry with a strength, which its label names as `bench` reads it."""
        label = f"{entry.label} {DIALS[name].spoken}={value:.8g}"
        return Entry(label, entry.method, {**entry.overrides, name: value})
