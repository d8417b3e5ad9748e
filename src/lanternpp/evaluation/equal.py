"""The strengths at which relaxed rules cost the same total variation, so that their speed-ups at an equal cost can be compared."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import fmean

from lanternpp.accept import RULES
from lanternpp.api.calls import Request, batch_size
from lanternpp.api.options import DIALS, Settings
from lanternpp.api.pipeline import Pipeline
from lanternpp.api.settings import dials_read, part
from lanternpp.errors import InputError
from lanternpp.evaluation.prompts import spread
from lanternpp.evaluation.race import FOLDER_REMEDY, Entry, Race, check_run, facts
from lanternpp.util.jsonfile import Journal
from lanternpp.util.terminal import say, track

STEPS = 400  # values of a dial that are tried: their distances from the exact value are a geometric sequence
RANGE = 1e7  # the greatest of these distances over the least


class StrengthSearch:
    """A search for the strengths at which entries of a race cost a given total variation, by bisection.

    race: with the entries, the prompts, the seed and the dials that the entries share. Total variation is measured on
    `num_pictures` pictures, once for each strength, and logged in the folder. Raises InputError if an entry other than plain decoding
    has no strength to find, or the folder holds another run.
    """

    def __init__(self, race: Race, num_pictures: int, folder: Path):
        self.pipe, self.shared = race.pipe, race.shared
        self.plain, *self.relaxed = race.entries
        if not self.relaxed:
            raise InputError("--equal-tv finds strengths of relaxed rules, and --methods names none; add one")
        for entry in self.relaxed:
            self.strength_dial(entry)
        self.prompts = spread(race.prompts, num_pictures)
        self.seeds = [race.seed + 2000 + i for i in range(num_pictures)]
        check_run(folder, facts(self.pipe, self.prompts, race.seed, shared=self.shared))
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

    def entries_at(self, limits: Sequence[float]) -> list[Entry]:
        """Return plain decoding, and the entries at the strengths that cost each limit; say on stderr which cost more at any strength."""
        by_label = {self.plain.label: self.plain}
        for limit, entry in track("finding strengths", list(product(limits, self.relaxed))):
            if strongest := self.find(entry, limit):
                by_label.setdefault(strongest.label, strongest)
            else:
                say("bench", f"{entry.label} costs more than {limit:g} a code at any strength: left out")
        return list(by_label.values())

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


def relaxed_methods(pipe: Pipeline) -> list[str]:
    """Return every relaxed rule that suits the model on one drafter, without a strength, as `--methods` takes them."""
    drafter = "parallel" if pipe.can_draft(pipe.settings("parallel")) else "eagle"
    relaxed = [name for name, rule in RULES.items() if rule.strength]
    with_neighbours = [rule for rule in relaxed if "neighbours" in dials_read("none", rule)]
    suffixes = dict.fromkeys(with_neighbours, f" k={pipe.settings('lantern++').neighbours}")
    has_codebook = pipe.target.codebook is not None
    rules = [rule for rule in relaxed if has_codebook or rule not in suffixes]
    return [f"{drafter} accept={rule}{suffixes.get(rule, '')}" for rule in rules]


def variation(pipe: Pipeline, prompts: Sequence[str], seeds: Sequence[int], settings: Settings) -> float:
    """Draw pictures with the settings' own draft and return the mean total variation of a picture."""
    batch = batch_size(settings.batch_size, len(seeds))
    settings = replace(settings, batch_size=batch, fit=False, measure_tv=True)
    request = Request(prompts, seeds, settings)
    result = pipe.draw(pipe.new_engine(settings), request, output_type="codes")
    return fmean(result.stats.tv_cost_per_image)
