"""A race of methods: they take turns at the same prompts and seeds, and every turn is logged when it ends.

A run's folder holds `run.json` (what is compared), `turns.jsonl` (a line per turn, so that a run stopped at any
moment goes on where it stopped) and `pictures/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from lanternpp.api.options import BASELINE, DraftDials, PartDials, RuleDials, check_method, dials
from lanternpp.api.picture import save_png
from lanternpp.api.pipeline import Pipeline, Result, versions
from lanternpp.engine.stopwatch import Stopwatch
from lanternpp.errors import InputError
from lanternpp.util import files, runlog
from lanternpp.util.devices import device_name
from lanternpp.util.jsonfile import read_object
from lanternpp.util.schema import checked

RUN, TURNS, PICTURES = "run.json", "turns.jsonl", "pictures"
METHOD_DIALS = dials(PartDials, DraftDials, RuleDials)  # what an entry may override
BY_KEY = {key: dial for dial in METHOD_DIALS for key in (dial.name, dial.spoken, dial.short) if key}


@dataclass(frozen=True)
class Entry:
    """One row of a race: a named method and what it overrides."""

    label: str
    method: str
    overrides: dict[str, Any]

    @property
    def slug(self) -> str:
        """The label as the name of a folder."""
        return re.sub(r"[^\w.+=-]+", "_", self.label)


@dataclass(frozen=True)
class Turn:
    """What one method drew for one prompt."""

    label: str
    prompt: int  # which of the race's prompts
    seed: int  # of its first picture
    seconds: float
    phases: dict[str, float]  # seconds
    accepted: list[list[int]]  # per picture: codes decided by each pass, the prefill first
    files: list[str]  # pictures, relative to the run's folder
    spent: list[float] | None = None  # tv_cost per picture, where it was measured


def parse_methods(text: str) -> list[Entry]:
    """Methods parted by commas, each with what it overrides behind it: "ar, lantern++ k=10 lambda=5".

    Plain AR is put first where it is missing, as all else is measured against it. Raises InputError.
    """
    found: dict[str, Entry] = {}
    for item in text.split(","):
        words = item.split()
        if not words:
            raise InputError(f"methods {text!r} has an empty entry; part names by single commas")
        check_method(words[0])
        overrides = dict(parse_override(word, item) for word in words[1:])
        label = " ".join(words)
        found[label] = Entry(label, words[0], overrides)
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
    """Entries over prompts and seeds, `batch_size` pictures of a prompt at a time; `n` seeds for each prompt, which no other has."""

    def __init__(
        self,
        pipe: Pipeline,
        field: Sequence[Entry],
        prompts: Sequence[str],
        n: int,
        seed: int,
        shared: dict[str, Any],
        measure_tv: bool,
    ):
        self.pipe, self.field, self.prompts = pipe, list(field), list(prompts)
        self.n, self.seed, self.measure_tv = n, seed, measure_tv
        self.overrides_of = {
            e.label: {"batch_size": 1, "compile": False} | shared | e.overrides for e in field
        }
        asked = {e.label: pipe.settings(e.method, **self.overrides_of[e.label]) for e in field}
        self.settings = {label: pipe.fit(settings) for label, settings in asked.items()}
        self.batch = self.settings[BASELINE].batch_size
        if n % self.batch:
            raise InputError(f"{n} pictures per prompt are not a whole number of batches of {self.batch}")
        for prompt in prompts:
            pipe.target.check(prompt)
        # made here, so that a wrong part is found before anything is drawn; kept, as their turns are timed
        self.engines = {label: pipe.new_engine(settings) for label, settings in self.settings.items()}

    def describe(self) -> dict[str, Any]:
        """What must be unchanged for a run to be resumed."""
        like = next(self.pipe.target.parameters())
        return {
            "model": self.pipe.name,
            "prompts": self.prompts,
            "n": self.n,
            "seed": self.seed,
            "seeds of a prompt": "its own",  # older runs had the same ones for all prompts
            "measure_tv": self.measure_tv,
            "device": device_name(like.device),
            "dtype": self.pipe.dtype,
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "methods": {label: asdict(settings) for label, settings in self.settings.items()},
        }

    def turns(self) -> Iterator[tuple[Entry, int, int]]:
        """(entry, prompt, first seed) as they are drawn: every entry in turn, another one first each time."""
        rounds = product(range(0, self.n, self.batch), range(len(self.prompts)))
        for place, (first, prompt) in enumerate(rounds):
            for i in range(len(self.field)):
                yield self.field[(place + i) % len(self.field)], prompt, self.seed + prompt * self.n + first

    def draw(self, entry: Entry, prompt: int, seed: int, **extra: Any) -> Result:
        """The pictures of one turn, by the entry's engine; with `extra` overrides, by an engine made for them."""
        if extra:
            overrides = self.overrides_of[entry.label] | extra
            return self.pipe(self.prompts[prompt], n=self.batch, seed=seed, method=entry.method, **overrides)
        conditions, seeds = [self.prompts[prompt]] * self.batch, range(seed, seed + self.batch)
        return self.pipe.draw(self.engines[entry.label], self.settings[entry.label], conditions, seeds)

    def run(
        self, folder: Path, resume: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> list[Turn]:
        """Draw every turn that the folder lacks; returns all of them.

        progress is called between turns only, so that it takes no time of theirs.
        """
        check_run(folder, self.describe(), resume)
        turns = read_turns(folder)
        done = {(t.label, t.prompt, t.seed) for t in turns}
        total = len(self.prompts) * self.n // self.batch * len(self.field)
        stopwatches: dict[str, Stopwatch] = {}
        for entry, prompt, seed in self.turns():
            if (entry.label, prompt, seed) in done:
                continue
            if progress:
                progress(len(turns), total)
            if entry.label not in stopwatches:
                self.draw(entry, prompt, seed)  # warm-up: what is built on first use is not timed
                stopwatches[entry.label] = Stopwatch(self.engines[entry.label])
            turns.append(self._turn(folder, entry, stopwatches[entry.label], prompt, seed))
            runlog.append(folder / TURNS, vars(turns[-1]))
        return turns

    def _turn(self, folder: Path, entry: Entry, watch: Stopwatch, prompt: int, seed: int) -> Turn:
        result = self.draw(entry, prompt, seed)
        stats, tv_cost = result.stats, None
        phases = watch.take(stats.seconds)
        if self.measure_tv and (seed - self.seed) % self.n == 0:
            tv_cost = self.draw(entry, prompt, seed, measure_tv=True).stats.tv_cost_per_image
        files = []
        for i, image in enumerate(result.images):
            name = f"{PICTURES}/{entry.slug}/{prompt:03d}-{seed + i}.png"
            notes = {"prompt": self.prompts[prompt], "seed": str(seed + i), "model": stats.model}
            save_png(image, folder / name, notes | {"settings": json.dumps(stats.settings, sort_keys=True)})
            files.append(name)
        accepted = split(stats.accepted_per_pass, self.pipe.target.length)
        return Turn(entry.label, prompt, seed, stats.seconds, phases, accepted, files, tv_cost)


def split(accepted: Sequence[int], length: int) -> list[list[int]]:
    """Codes decided by each pass of several pictures, one list per picture of `length` codes."""
    pictures: list[list[int]] = [[]]
    for count in accepted:
        if sum(pictures[-1]) == length:
            pictures.append([])
        pictures[-1].append(count)
    return pictures


def check_run(folder: Path, run: dict[str, Any], resume: bool) -> None:
    """Write `run.json`, or compare it with the one in the folder; InputError names what differs."""
    path = folder / RUN
    if not path.exists():
        files.write_text(path, json.dumps(run, indent=2) + "\n")
        return
    if not resume:
        raise InputError(
            f"{folder} holds a run already; go on with it by --resume, or choose another folder with -o"
        )
    old = read_object(path, "choose another folder with -o")
    differing = list(differences(old, run))
    if differing:
        raise InputError(
            f"{folder} holds a run with other settings ({'; '.join(differing)}); repeat them to go on with it, "
            "or choose another folder with -o"
        )


def differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """What differs between two nested objects, by the names that lead to it: "settings.lam 2.0 -> 4.0"."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new:
        long = any(isinstance(value, dict | list) for value in (old, new))
        yield name if long else f"{name} {old!r} -> {new!r}"


def read_turns(folder: Path) -> list[Turn]:
    """The turns a folder holds; a last line cut short by a kill is taken off."""
    return runlog.read_rows(
        folder / TURNS, lambda row: checked("its turn", row, Turn), "choose another folder with -o"
    )
