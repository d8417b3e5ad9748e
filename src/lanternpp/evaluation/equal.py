"""The strengths at which relaxed rules cost the same total variation, so that their speed-ups at an equal cost can be compared."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from lanternpp.api.calls import Request, batch_size
from lanternpp.api.options import BASELINE, DIALS, Settings
from lanternpp.api.pipeline import Pipeline, versions
from lanternpp.errors import InputError
from lanternpp.evaluation.prompts import spread
from lanternpp.evaluation.race import ELSEWHERE, Entry, check_run, machine
from lanternpp.util.jsonfile import Journal

STRENGTHS = {  # the dial of each rule, its exact value, and the greatest that is tried
    "lantern": ("delta", 0.0, 1.0),
    "lantern++": ("lam", 1.0, 100.0),
    "cool": ("delta", 1.0, 100.0),
    "cactus": ("delta", 0.0, 10.0),
    "mixture": ("delta", 0.0, 1.0),
}
# values of a dial that are tried, in a geometric row, and how many times greater the last is than the first
STEPS, RANGE = 400, 1e7


class StrengthSearch:
    """Measures what entries of a race cost, over some pictures, and finds their strengths by bisection.

    shared: dials of all entries. Measurements are kept in the folder, and made once. Raises InputError where an
    entry other than plain decoding has no strength to find, or the folder holds something else.
    """

    def __init__(
        self,
        pipe: Pipeline,
        field: Sequence[Entry],
        prompts: Sequence[str],
        pictures: int,
        seed: int,
        shared: Mapping[str, Any],
        folder: Path,
    ):
        for prompt in prompts:
            pipe.target.check(prompt)
        self.pipe, self.shared = pipe, dict(shared)
        for entry in field:
            if entry.method != BASELINE:
                self.dial(entry)
        self.prompts, self.seeds = spread(prompts, pictures), [seed + 2000 + i for i in range(pictures)]
        facts = {"model": pipe.name, "weights": pipe.model.weights, "prompts": self.prompts, "seed": seed}
        check_run(folder, facts | machine(pipe) | {"versions": versions(), "shared": self.shared})
        self.journal = Journal(folder / "tv.jsonl", ELSEWHERE)

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

    def find(self, entry: Entry, limit: float) -> Entry | None:
        """An entry at the greatest strength that costs at most so much per code, with that cost; None where the least costs more."""
        name, exact, most = self.dial(entry)

        def at(place: int) -> Entry:
            step = (most - exact) * RANGE ** (place / (STEPS - 1) - 1)
            value = round(exact + float(f"{step:.3g}"), 12)
            label = f"{entry.label} {DIALS[name].spoken}={value:.8g}"
            return Entry(label, entry.method, {**entry.overrides, name: value})

        count = bisect_right(range(STEPS), limit, key=lambda place: self.tv_per_code(at(place)))
        if not count:
            return None
        found = at(count - 1)
        return replace(found, figures={"tv_per_code": self.tv_per_code(found), "tv_budget": limit})

    def tv_per_code(self, entry: Entry) -> float:
        """Total variation per code, the mean over pictures; measured once."""
        settings = self.pipe.settings(entry.method, **{"batch_size": 1, **self.shared, **entry.overrides})
        drawn = replace(settings, batch_size=self.shared.get("batch_size", min(len(self.seeds), 8)))

        def measure() -> float:
            return variation(self.pipe, self.prompts, self.seeds, drawn) / self.pipe.target.length

        return float(self.journal.once({"label": entry.label, "settings": asdict(settings)}, measure))


def variation(pipe: Pipeline, prompts: Sequence[str], seeds: Sequence[int], settings: Settings) -> float:
    """Total variation of a picture, the mean over pictures that are drawn now, with the settings' own draft."""
    batch = batch_size(settings.batch_size, len(seeds))
    settings = replace(settings, batch_size=batch, fit=False, measure_tv=True)
    request = Request(prompts, seeds, settings)
    drawn = pipe.draw(pipe.new_engine(settings), request, output_type="codes")
    return fmean(drawn.stats.tv_cost_per_image)
