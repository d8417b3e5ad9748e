"""A race of methods: they take turns at the same prompts and seeds, and every turn is logged when it ends.

A run's folder holds `run.json` (the entries and their settings), `turns.jsonl` (a line per turn, so that a run stopped at any
moment goes on where it stopped) and `pictures/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from lanternpp.api.calls import Request
from lanternpp.api.options import BASELINE, DIALS, MethodDials, check_method, names
from lanternpp.api.picture import notes, save_png
from lanternpp.api.pipeline import Pipeline, Result, versions
from lanternpp.engine.stopwatch import Stopwatch
from lanternpp.errors import InputError
from lanternpp.util.devices import device_name
from lanternpp.util.jsonfile import differences, key_of, read_object, write_json
from lanternpp.util.progress import Progress
from lanternpp.util.runlog import Journal
from lanternpp.util.schema import checked

RUN, TURNS, PICTURES = "run.json", "turns.jsonl", "pictures"
ELSEWHERE = "choose another folder with -o"
METHOD_DIALS = [DIALS[name] for name in names(MethodDials)]  # an entry's possible overrides
BY_KEY = {key: dial for dial in METHOD_DIALS for key in (dial.name, dial.spoken, dial.short) if key}


@dataclass(frozen=True)
class Entry:
    """One row of a race: a named method, its overrides, and figures of it that are known before."""

    label: str
    method: str
    overrides: dict[str, Any]
    figures: Mapping[str, float] | None = None

    @property
    def slug(self) -> str:
        """The label as the name of a folder."""
        return re.sub(r"[^\w.+=-]+", "_", self.label)


@dataclass(frozen=True)
class Turn:
    """Pictures of one method for one prompt, and their times."""

    label: str
    prompt: int  # which of the race's prompts
    seed: int  # of its first picture
    seconds: float
    phases: dict[str, float]  # seconds
    accepted: list[list[int]]  # per picture: codes decided by each pass, the prefill first
    files: list[str]  # pictures, relative to the run's folder
    tv_cost: list[float] | None = None  # per picture, where it was measured


def parse_methods(text: str) -> list[Entry]:
    """Methods separated by commas, each followed by its overrides: "ar, lantern++ k=10 lambda=5".

    Plain decoding is put first where it is missing, as all else is measured against it. Raises InputError.
    """
    found: dict[str, Entry] = {}
    for item in text.split(","):
        words = item.split()
        if not words:
            raise InputError(f"methods {text!r} has an empty entry; separate names by single commas")
        check_method(words[0])
        label = " ".join(words)
        found[label] = Entry(label, words[0], dict(parse_override(word, item) for word in words[1:]))
    return list({BASELINE: Entry(BASELINE, BASELINE, {}), **found}.values())


def parse_override(word: str, item: str) -> tuple[str, Any]:
    """`key=value` as a field of Settings and its value; InputError names the entry it stands in."""
    key, _, value = word.partition("=")
    dial = BY_KEY.get(key)
    if dial is None or not value:
        known = ", ".join(dial.short or dial.spoken for dial in METHOD_DIALS)
        raise InputError(
            f"{word!r} in method {item.strip()!r} is no override; write key=value with one of: {known}"
        )
    try:
        return dial.name, dial.kind(value)
    except ValueError:
        kind = "a whole number" if dial.kind is int else "a number"
        raise InputError(f"{word!r} in method {item.strip()!r}: {value!r} is not {kind}") from None


class Race:
    """Entries over prompts and seeds: `n` pictures of each prompt by each entry, with seeds that no other prompt has.

    A turn draws `turn` pictures of a prompt, by default a batch. shared: overrides of all entries. measure_tv: also measure the total
    variation of the first turn of each prompt, drawn again. Raises InputError.
    """

    def __init__(
        self,
        pipe: Pipeline,
        field: Sequence[Entry],
        prompts: Sequence[str],
        n: int,
        seed: int,
        shared: Mapping[str, Any],
        measure_tv: bool,
        turn: int | None = None,
    ):
        self.pipe, self.field, self.prompts = pipe, list(field), list(prompts)
        self.n, self.seed, self.measure_tv = n, seed, measure_tv
        self.overrides = {
            e.label: {"batch_size": 1, "compile": False, **shared, **e.overrides} for e in field
        }
        asked = {e.label: pipe.settings(e.method, **self.overrides[e.label]) for e in field}
        self.settings = {label: pipe.fit(settings) for label, settings in asked.items()}
        self.batch = self.settings[BASELINE].batch_size
        self.turn = turn or self.batch
        if n % self.turn:
            raise InputError(f"{n} pictures per prompt are not a whole number of batches of {self.turn}")
        for prompt in prompts:
            pipe.target.check(prompt)
        # made here, so that a wrong part is found before anything is drawn; kept, as their turns are timed
        self.engines = {label: pipe.new_engine(settings) for label, settings in self.settings.items()}
        self._watches: dict[str, Stopwatch] = {}

    def describe(self) -> dict[str, Any]:
        """The facts and settings that a resumed run must share."""
        return {
            "model": self.pipe.name,
            "prompts": self.prompts,
            "n": self.n,
            "seed": self.seed,
            "measure_tv": self.measure_tv,
            **machine(self.pipe),
            "versions": versions(),
            "methods": {label: asdict(settings) for label, settings in self.settings.items()},
        }

    def turns(self) -> Iterator[tuple[Entry, int, int]]:
        """(entry, prompt, first seed) as they are drawn: every entry in turn, another one first each time."""
        rounds = product(range(0, self.n, self.turn), range(len(self.prompts)))
        for place, (first, prompt) in enumerate(rounds):
            for i in range(len(self.field)):
                yield self.field[(place + i) % len(self.field)], prompt, self.seed + prompt * self.n + first

    def draw(self, entry: Entry, prompt: int, seed: int) -> tuple[Request, Result]:
        """The pictures of one turn, by the entry's engine; the request holds what was decided of each."""
        conditions, seeds = [self.prompts[prompt]] * self.turn, range(seed, seed + self.turn)
        request = Request(conditions, seeds, self.settings[entry.label])
        return request, self.pipe.draw(self.engines[entry.label], request)

    def run(self, folder: Path, resume: bool = False, progress: Progress | None = None) -> list[Turn]:
        """Draw every turn that the folder lacks; returns all of them.

        progress is called between turns only, so that it takes no time of theirs.
        """
        check_run(folder, self.describe(), resume)
        journal = Journal(folder / TURNS, ELSEWHERE)
        turns: list[Turn] = []
        total = len(self.prompts) * self.n // self.turn * len(self.field)
        for entry, prompt, seed in self.turns():
            key = {"label": entry.label, "prompt": prompt, "seed": seed}
            if progress and key_of(key) not in journal:
                progress(len(journal), total)
            figures = journal.once(key, partial(self._turn, folder, entry, prompt, seed))
            turns.append(checked("its turn", key | figures, Turn))
        return turns

    def _turn(self, folder: Path, entry: Entry, prompt: int, seed: int) -> dict[str, Any]:
        if entry.label not in self._watches:
            # A warm-up: parts that are built on first use are not timed.
            self.draw(entry, prompt, seed)
            self._watches[entry.label] = Stopwatch(self.engines[entry.label])
        request, result = self.draw(entry, prompt, seed)
        stats, tv_cost = result.stats, None
        phases = self._watches[entry.label].take(stats.seconds)
        if self.measure_tv and (seed - self.seed) % self.n == 0:
            given = self.overrides[entry.label] | {"measure_tv": True}
            again = self.pipe(self.prompts[prompt], n=self.turn, seed=seed, method=entry.method, **given)
            tv_cost = again.stats.tv_cost_per_image
        names = []
        for i, image in enumerate(result.images):
            names.append(f"{PICTURES}/{entry.slug}/{prompt:03d}-{seed + i}.png")
            facts = notes(self.prompts[prompt], seed + i, stats.model, stats.settings, stats.versions)
            save_png(image, folder / names[-1], facts)
        return {
            "seconds": stats.seconds,
            "phases": phases,
            "accepted": [request.found[place].accepted for place in range(self.turn)],
            "files": names,
            "tv_cost": tv_cost,
        }


def machine(pipe: Pipeline) -> dict[str, Any]:
    """Where seconds are measured."""
    return {"device": device_name(pipe.device), "dtype": pipe.dtype, "threads": torch.get_num_threads()}


def check_run(folder: Path, run: Mapping[str, Any], resume: bool) -> None:
    """Write `run.json`, or compare it with the one in the folder; InputError names what differs."""
    path, run = folder / RUN, json.loads(json.dumps(run))
    if not path.exists():
        write_json(path, run)
        return
    check_new(folder, resume)
    differing = list(differences(read_object(path, ELSEWHERE), run))
    if differing:
        raise InputError(
            f"{folder} holds a run with other settings ({'; '.join(differing)}); repeat them to go on with it, "
            f"or {ELSEWHERE}"
        )


def check_new(folder: Path, resume: bool) -> None:
    """InputError where a folder holds a run that is not to go on."""
    if (folder / RUN).exists() and not resume:
        raise InputError(f"{folder} holds a run already; go on with it by --resume, or {ELSEWHERE}")
