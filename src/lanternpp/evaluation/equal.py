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
from lanternpp.api.pipeline import Pipeline
from lanternpp.api.settings import part
from lanternpp.errors import InputError
from lanternpp.evaluation.prompts import spread
from lanternpp.evaluation.race import FOLDER_REMEDY, Entry, check_run, facts
from lanternpp.util.jsonfile import Journal

STEPS = 400  # values of a dial that are tried: their distances from the exact value are a geometric sequence
RANGE = 1e7  # the greatest of these distances over the least


class StrengthSearch:
    """A search for the strengths at which entries of a race cost a given total variation, by bisection.

    shared: dials of all entries. Total variation is measured on `num_pictures` pictures, once for each strength, and logged in the
    folder. Raises InputError if an entry other than plain decoding has no strength to find, or the folder holds another run.
    """

    def __init__(
        self,
        pipe: Pipeline,
        entries: Sequence[Entry],
        prompts: Sequence[str],
        num_pictures: int,
        seed: int,
        shared: Mapping[str, Any],
        folder: Path,
    ):
        for prompt in prompts:
            pipe.target.check(prompt)
        self.pipe, self.shared = pipe, dict(shared)
        for entry in entries:
            if entry.method != BASELINE:
                self.strength_dial(entry)
        self.prompts = spread(prompts, num_pictures)
        self.seeds = [seed + 2000 + i for i in range(num_pictures)]
        check_run(folder, facts(pipe, self.prompts, seed, shared=self.shared))
        self.journal = Journal(folder / "tv.jsonl", FOLDER_REMEDY)

    def strength_dial(self, entry: Entry) -> tuple[str, float, float]:
        """Return the `strength` of an entry's rule; raise InputError if there is none, or the entry gives the dial."""
        rule = self.pipe.settings(entry.method, **(self.shared | entry.overrides)).accept
        strength: tuple[str, float, float] | None = part("accept", rule).strength
        if strength is None:
            raise InputError(f"{entry.label!r} has the rule {rule!r}, without a strength; use a relaxed one")
        if strength[0] in entry.overrides:
            raise InputError(
                f"{entry.label!r} gives {DIALS[strength[0]].spoken}, which is what equal variation finds; leave it out"
            )
        return strength

    def find(self, entry: Entry, limit: float) -> Entry | None:
        """Return the entry at the greatest strength that costs at most `limit` per code, with its figures; None if all cost more."""
        name, exact, greatest = self.strength_dial(entry)

        def entry_at(step: int) -> Entry:
            distance = (greatest - exact) * RANGE ** (step / (STEPS - 1) - 1)
            value = round(exact + float(f"{distance:.3g}"), 12)
            label = f"{entry.label} {DIALS[name].spoken}={value:.8g}"
            return Entry(label, entry.method, {**entry.overrides, name: value})

        num_within = bisect_right(range(STEPS), limit, key=lambda step: self.tv_per_code(entry_at(step)))
        if not num_within:
            return None
        strongest = entry_at(num_within - 1)
        return replace(strongest, figures={"tv_per_code": self.tv_per_code(strongest), "tv_budget": limit})

    def tv_per_code(self, entry: Entry) -> float:
        """Return the total variation per code, the mean over pictures, which is measured once."""
        settings = self.pipe.settings(entry.method, **{"batch_size": 1, **self.shared, **entry.overrides})
        batched = replace(settings, batch_size=self.shared.get("batch_size", min(len(self.seeds), 8)))

        def measure() -> float:
            return variation(self.pipe, self.prompts, self.seeds, batched) / self.pipe.target.length

        return float(self.journal.once({"label": entry.label, "settings": asdict(settings)}, measure))


def variation(pipe: Pipeline, prompts: Sequence[str], seeds: Sequence[int], settings: Settings) -> float:
    """Draw pictures with the settings' own draft and return the mean total variation of a picture."""
    batch = batch_size(settings.batch_size, len(seeds))
    settings = replace(settings, batch_size=batch, fit=False, measure_tv=True)
    request = Request(prompts, seeds, settings)
    result = pipe.draw(pipe.new_engine(settings), request, output_type="codes")
    return fmean(result.stats.tv_cost_per_image)
