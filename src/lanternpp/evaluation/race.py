"""A race of methods: they take turns at the same prompts and seeds, and every turn is logged when it ends.

A run's folder holds `run.json` (the entries and their settings, as asked for and as fitted to the machine), `turns.jsonl` (a line
per turn, so that a run stopped at any moment goes on where it stopped) and `pictures/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from lanternpp.api.calls import Request
from lanternpp.api.options import BASELINE, DIALS, MethodDials, Settings, check_method, names
from lanternpp.api.picture import notes, save_png
from lanternpp.api.pipeline import Pipeline, Result, versions
from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import Stopwatch
from lanternpp.errors import InputError
from lanternpp.util.devices import device_name
from lanternpp.util.files import digest
from lanternpp.util.jsonfile import Journal, checked, differences, key_of, read_object, write_json
from lanternpp.util.terminal import Progress

RUN, TURNS, PICTURES = "run.json", "turns.jsonl", "pictures"
FITTED = "fitted"  # settings in `run.json` that a resumed run takes over, while others must be the same
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
        """The label as the name of a folder; trees of nodes may be long, and differ in brackets alone."""
        spaced, name = self.label.replace(" ", "_"), re.sub(r"[^\w.+=-]+", "_", self.label)
        return name if name == spaced else f"{name[:40]}-{digest([self.label])}"


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
    for item in split_outside_brackets(text):
        words = item.split()
        if not words:
            raise InputError(f"methods {text!r} has an empty entry; separate names by single commas")
        check_method(words[0])
        label, given = " ".join(words), [parse_override(word, item) for word in words[1:]]
        if len(overrides := dict(given)) < len(given):
            raise InputError(f"method {label!r} gives a dial twice; leave one out")
        found[label] = Entry(label, words[0], overrides)
    return list({BASELINE: Entry(BASELINE, BASELINE, {}), **found}.values())


def split_outside_brackets(text: str) -> list[str]:
    """The parts between commas that are in no brackets; in brackets there are no spaces afterwards."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == "," and not depth:
            parts.append("")
        elif not (depth and char.isspace()):
            parts[-1] += char
    return parts


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
        return dial.name, {"true": True, "false": False}[value] if dial.kind is bool else dial.kind(value)
    except (KeyError, ValueError):
        kind = {int: "a whole number", bool: "true or false"}.get(dial.kind, "a number")
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
        usual = {"batch_size": 1, "compile": False, **shared}
        self.asked = {e.label: pipe.settings(e.method, **{**usual, **e.overrides}) for e in field}
        self.settings: dict[str, Settings] = {}  # of `asked`, fitted when the race begins
        self.batch = self.asked[BASELINE].batch_size
        self.turn = turn or self.batch
        if n % self.turn:
            raise InputError(f"{n} pictures per prompt are not a whole number of batches of {self.turn}")
        for prompt in prompts:
            pipe.target.check(prompt)
        self.engines: dict[str, Engine] = {}  # kept, as their turns are timed
        self._watches: dict[str, Stopwatch] = {}

    def describe(self, settings: Mapping[str, Settings] | None = None) -> dict[str, Any]:
        """The facts of the race, with these settings, by default those that it draws with."""
        return {
            "model": self.pipe.name,
            "weights": self.pipe.model.weights,
            "prompts": self.prompts,
            "n": self.n,
            "seed": self.seed,
            "measure_tv": self.measure_tv,
            **machine(self.pipe),
            "versions": versions(),
            "methods": {label: asdict(each) for label, each in (settings or self.settings).items()},
        }

    def turns(self) -> Iterator[tuple[Entry, int, int]]:
        """(entry, prompt, first seed) as they are drawn: every entry in turn, another one first each time."""
        rounds = product(range(0, self.n, self.turn), range(len(self.prompts)))
        for place, (first, prompt) in enumerate(rounds):
            for i in range(len(self.field)):
                yield self.field[(place + i) % len(self.field)], prompt, self.seed + prompt * self.n + first

    def draw(self, entry: Entry, prompt: int, seed: int, measure_tv: bool = False) -> tuple[Request, Result]:
        """The pictures of one turn, by the entry's engine; the request holds what was decided of each.

        measure_tv: with their total variation, by an engine that is freed afterwards.
        """
        conditions, seeds = [self.prompts[prompt]] * self.turn, range(seed, seed + self.turn)
        settings, engine = self.settings[entry.label], self.engines[entry.label]
        if measure_tv:
            settings = replace(settings, measure_tv=True)
            engine = self.pipe.new_engine(settings)
        request = Request(conditions, seeds, settings)
        return request, self.pipe.draw(engine, request)

    def run(self, folder: Path, progress: Progress | None = None) -> list[Turn]:
        """Draw every turn that the folder lacks, and pictures that were removed from it; returns all turns.

        progress is called between turns only, so that it takes no time of theirs. InputError where the folder holds another run.
        """
        asked = self.describe(self.asked)
        kept = read_run(folder, asked)
        self.settings = self._fitted(kept)
        # before anything is written, so that a wrong part is found first
        self.engines = {label: self.pipe.new_engine(one, timed=True) for label, one in self.settings.items()}
        if kept is None:
            write_json(folder / RUN, asked | {FITTED: self.describe()["methods"]})
        journal = Journal(folder / TURNS, ELSEWHERE)
        turns: list[Turn] = []
        total = len(self.prompts) * self.n // self.turn * len(self.field)
        for entry, prompt, seed in self.turns():
            key = {"label": entry.label, "prompt": prompt, "seed": seed}
            if progress and key_of(key) not in journal:
                progress(len(journal), total)
            figures = journal.once(key, partial(self._turn, folder, entry, prompt, seed))
            turns.append(checked("its turn", key | figures, Turn))
        # last, as drawing again would be timed with the next turn
        for (entry, prompt, seed), turn in zip(self.turns(), turns, strict=True):
            if not all((folder / name).is_file() for name in turn.files):
                self._save(folder, entry, prompt, seed, self.draw(entry, prompt, seed)[1])
        return turns

    def _fitted(self, kept: Mapping[str, Any] | None) -> dict[str, Settings]:
        """The settings fitted to the machine, or those of a run that goes on: acceptance may be better known by now."""
        if kept is None:
            return {label: self.pipe.fit(settings) for label, settings in self.asked.items()}
        found, asked = checked(FITTED, kept.get(FITTED), dict[str, Settings]), kept["methods"]
        # what is the same as text stays as it is: it may be a class that was imported
        return {
            label: replace(
                settings,
                **{k: v for k, v in vars(found.get(label, settings)).items() if v != asked[label][k]},
            )
            for label, settings in self.asked.items()
        }

    def _turn(self, folder: Path, entry: Entry, prompt: int, seed: int) -> dict[str, Any]:
        if entry.label not in self._watches:
            # A warm-up: parts that are built on first use are not timed.
            self.draw(entry, prompt, seed)
            self._watches[entry.label] = Stopwatch(self.engines[entry.label])
        request, result = self.draw(entry, prompt, seed)
        stats, tv_cost = result.stats, None
        phases = self._watches[entry.label].take(stats.seconds)
        if self.measure_tv and (seed - self.seed) % self.n == 0:
            tv_cost = self.draw(entry, prompt, seed, measure_tv=True)[1].stats.tv_cost_per_image
        return {
            "seconds": stats.seconds,
            "phases": phases,
            "accepted": [request.found[place].accepted for place in range(self.turn)],
            "files": self._save(folder, entry, prompt, seed, result),
            "tv_cost": tv_cost,
        }

    def _save(self, folder: Path, entry: Entry, prompt: int, seed: int, result: Result) -> list[str]:
        """Write the pictures of a turn; their names in the folder."""
        names, stats = [], result.stats
        for i, image in enumerate(result.images):
            names.append(f"{PICTURES}/{entry.slug}/{prompt:03d}-{seed + i}.png")
            facts = notes(self.prompts[prompt], seed + i, stats.model, stats.settings, stats.versions)
            save_png(image, folder / names[-1], facts)
        return names


def machine(pipe: Pipeline) -> dict[str, Any]:
    """Where seconds are measured."""
    return {"device": device_name(pipe.device), "dtype": pipe.dtype, "threads": torch.get_num_threads()}


def check_run(folder: Path, run: Mapping[str, Any], remedy: str = ELSEWHERE) -> None:
    """Write `run.json`, or compare it with the one in the folder; InputError names what differs."""
    if read_run(folder, run, remedy) is None:
        write_json(folder / RUN, run)


def read_run(folder: Path, run: Mapping[str, Any], remedy: str = ELSEWHERE) -> dict[str, Any] | None:
    """The content of a folder's `run.json`; None where there is none. InputError names what differs from this run."""
    if not (folder / RUN).exists():
        return None
    found = read_object(folder / RUN, ELSEWHERE)
    shared = {name: value for name, value in found.items() if name != FITTED}
    if differing := list(differences(shared, json.loads(json.dumps(run)))):
        raise InputError(
            f"{folder} holds a run with other settings ({'; '.join(differing)}); repeat them to go on with it, "
            f"or {remedy}"
        )
    return found
