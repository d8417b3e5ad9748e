"""A race of methods: they take turns at the same prompts and seeds, and every turn is logged when it ends.

The folder of a run holds `run.json` (the entries and their settings as requested), `turns.jsonl` (what a fit to the machine changed
in the settings, and a line per turn, so that a run can be stopped at any moment and resumed) and `pictures/`.
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
from lanternpp.api.picture import save_png
from lanternpp.api.pipeline import Pipeline
from lanternpp.api.results import Result, versions
from lanternpp.api.settings import network_needed
from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import Stopwatch
from lanternpp.errors import InputError, counted
from lanternpp.util.devices import device_name
from lanternpp.util.files import digest
from lanternpp.util.jsonfile import Journal, differences, key_of, read_object, validated, write_json
from lanternpp.util.terminal import track

RUN, TURNS, PICTURES = "run.json", "turns.jsonl", "pictures"
FOLDER_REMEDY = "choose another folder with -o"
METHOD_DIALS = [DIALS[name] for name in names(MethodDials)]  # the dials that an entry may override
DIALS_BY_KEY = {key: dial for dial in METHOD_DIALS for key in (dial.name, dial.spoken, dial.short) if key}


@dataclass(frozen=True)
class Entry:
    """A method with its overrides that takes part in a race. figures: known before the race."""

    label: str
    method: str
    overrides: dict[str, Any]
    figures: Mapping[str, float] | None = None

    @property
    def slug(self) -> str:
        """The label as the name of a folder, with a digest where characters of the label are missing from the name."""
        name = re.sub(r"[^\w.+=-]+", "_", self.label)
        # Trees of nodes may be long, and differ in brackets alone.
        return name if name == self.label.replace(" ", "_") else f"{name[:40]}-{digest([self.label])}"


@dataclass(frozen=True)
class Turn:
    """Pictures of one method for one prompt, and their times."""

    label: str
    prompt: int  # index of the prompt
    seed: int  # of the first picture
    seconds: float
    phases: dict[str, float]  # seconds
    accepted: list[list[int]]  # per picture: codes decided by each pass, the prefill first
    files: list[str]  # pictures, relative to the run's folder
    tv_cost: list[float] | None = None  # per picture; None if not measured


def parse_methods(text: str) -> list[Entry]:
    """Parse methods separated by commas, each followed by its overrides: "ar, lantern++ k=10 lambda=5". Raise InputError.

    Plain decoding is always the first entry, as every method is measured against plain decoding.
    """
    entries = {BASELINE: Entry(BASELINE, BASELINE, {})}
    for item in split_outside_brackets(text):
        words = item.split()
        if not words:
            raise InputError(f"methods {text!r} has an empty entry; separate names by single commas")
        check_method(words[0])
        label = " ".join(words)
        pairs = [parse_override(word, item) for word in words[1:]]
        if len(overrides := dict(pairs)) < len(pairs):
            raise InputError(f"method {label!r} gives a dial twice; leave one out")
        entries[label] = Entry(label, words[0], overrides)
    return list(entries.values())


def split_outside_brackets(text: str) -> list[str]:
    """Split a text at the commas outside brackets, and remove the spaces inside brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += {"[": 1, "]": -1}.get(char, 0)
        if char == "," and not depth:
            parts.append("")
        elif not (depth and char.isspace()):
            parts[-1] += char
    return parts


def parse_override(word: str, item: str) -> tuple[str, Any]:
    """Parse `key=value` of the entry `item` as a field of Settings and its value; raise InputError, which quotes the entry."""
    key, _, value = word.partition("=")
    dial = DIALS_BY_KEY.get(key)
    if dial is None or not value:
        keys = ", ".join(dial.short or dial.spoken for dial in METHOD_DIALS)
        raise InputError(
            f"{word!r} in method {item.strip()!r} is no override; write key=value with one of: {keys}"
        )
    try:
        if dial.kind is bool:
            return dial.name, {"true": True, "false": False}[value]
        return dial.name, dial.kind(value)
    except (KeyError, ValueError):
        kind = {int: "a whole number", bool: "true or false"}.get(dial.kind, "a number")
        raise InputError(f"{word!r} in method {item.strip()!r}: {value!r} is not {kind}") from None


class Race:
    """A race in which each entry draws `n` pictures of each prompt, with seeds that no other prompt has.

    A turn draws `turn_size` pictures of one prompt, by default a batch. shared: overrides of all entries. measure_tv: draw the first
    turn of each prompt once more, untimed, to measure its total variation. Raises InputError.
    """

    def __init__(
        self,
        pipe: Pipeline,
        entries: Sequence[Entry],
        prompts: Sequence[str],
        n: int,
        seed: int,
        shared: Mapping[str, Any],
        measure_tv: bool,
        turn_size: int | None = None,
    ):
        self.pipe, self.entries, self.prompts = pipe, list(entries), list(prompts)
        self.n, self.seed, self.shared, self.measure_tv = n, seed, dict(shared), measure_tv
        defaults = {"batch_size": 1, "compile": False, **shared}
        self.requested = {e.label: pipe.settings(e.method, **(defaults | e.overrides)) for e in entries}
        if pipe.model.drafter and not any(map(network_needed, self.requested.values())):
            raise InputError(f"--drafter has no effect on {', '.join(self.requested)}; add a method with one")
        self.settings: dict[str, Settings] = {}  # fitted to the machine when the race begins
        self.facts = facts(pipe, self.prompts, seed, n=n, measure_tv=measure_tv)
        self.batch_size = self.requested[BASELINE].batch_size
        self.turn_size = turn_size or self.batch_size
        if n % self.turn_size:
            raise InputError(
                f"{counted(n, 'picture')} per prompt cannot be divided into batches of {self.turn_size}"
            )
        for prompt in prompts:
            pipe.target.check(prompt)
        self.engines: dict[str, Engine] = {}  # one per label for the whole race, as turns are timed
        self._stopwatches: dict[str, Stopwatch] = {}

    def describe(self) -> dict[str, Any]:
        """Return the facts of the race, with the settings that the methods are drawn with."""
        methods = {label: asdict(settings) for label, settings in self.settings.items()}
        return self.facts | {"methods": methods}

    def turns(self) -> Iterator[tuple[Entry, int, int]]:
        """Yield (entry, index of the prompt, first seed) in the order of drawing; each round begins with another entry."""
        rounds = product(range(0, self.n, self.turn_size), range(len(self.prompts)))
        for number, (offset, prompt) in enumerate(rounds):
            for i in range(len(self.entries)):
                entry = self.entries[(number + i) % len(self.entries)]
                yield entry, prompt, self.seed + prompt * self.n + offset

    def draw(self, entry: Entry, prompt: int, seed: int, measure_tv: bool = False) -> tuple[Request, Result]:
        """Draw one turn; return the request with its samples, and the result. measure_tv: in a new engine, with total variation."""
        settings, engine = self.settings[entry.label], self.engines[entry.label]
        if measure_tv:
            settings = replace(settings, measure_tv=True)
            engine = self.pipe.new_engine(settings)
        seeds = range(seed, seed + self.turn_size)
        request = Request([self.prompts[prompt]] * self.turn_size, seeds, settings)
        return request, self.pipe.draw(engine, request)

    def run(self, folder: Path) -> list[Turn]:
        """Draw every turn that the folder lacks, and every picture that was removed from the folder; return all turns.

        Raise InputError if the folder holds another run.
        """
        journal = Journal(folder / TURNS, FOLDER_REMEDY)
        fits = {label: self._fit(label, journal) for label in self.requested}
        self.settings = {label: replace(self.requested[label], **changes) for label, changes in fits.items()}
        # Engines are built before anything is written, so that a wrong part is found first.
        self.engines = {label: self.pipe.new_engine(s, timed=True) for label, s in self.settings.items()}
        check_run(folder, self.facts | {"methods": {label: asdict(x) for label, x in self.requested.items()}})
        for label, changes in fits.items():
            journal.once({"fit": label}, partial(dict, changes))
        turns: list[Turn] = []
        for entry, prompt, seed in track("racing", list(self.turns())):
            key = {"label": entry.label, "prompt": prompt, "seed": seed}
            figures = journal.once(key, partial(self._measure_turn, folder, entry, prompt, seed))
            turns.append(validated("its turn", key | figures, Turn))
        # Removed pictures are drawn again after all turns, as a stopwatch would time them with the next turn.
        for (entry, prompt, seed), turn in zip(self.turns(), turns, strict=True):
            if not all((folder / name).is_file() for name in turn.files):
                self._save(folder, entry, prompt, seed, self.draw(entry, prompt, seed)[1])
        return turns

    def _fit(self, label: str, journal: Journal) -> dict[str, Any]:
        """Return what the fit to the machine changes in an entry's settings; a resumed run has it logged, as it may differ by now."""
        key, requested = key_of({"fit": label}), vars(self.requested[label])
        if key in journal:
            changes = journal[key]
            if not isinstance(changes, dict) or not changes.keys() <= requested.keys():
                raise InputError(f"{journal.path} is damaged: {FOLDER_REMEDY}")
            return changes
        fitted = vars(self.pipe.fit(self.requested[label]))
        return {name: value for name, value in fitted.items() if value != requested[name]}

    def _measure_turn(self, folder: Path, entry: Entry, prompt: int, seed: int) -> dict[str, Any]:
        if entry.label not in self._stopwatches:
            # A warm-up: parts that are built on first use are not timed.
            self.draw(entry, prompt, seed)
            self._stopwatches[entry.label] = Stopwatch(self.engines[entry.label])
        request, result = self.draw(entry, prompt, seed)
        phases = self._stopwatches[entry.label].take(result.stats.seconds)
        tv_cost = None
        if self.measure_tv and (seed - self.seed) % self.n == 0:
            tv_cost = self.draw(entry, prompt, seed, measure_tv=True)[1].stats.tv_cost_per_image
        return {
            "seconds": result.stats.seconds,
            "phases": phases,
            "accepted": [request.samples[i].accepted for i in range(self.turn_size)],
            "files": self._save(folder, entry, prompt, seed, result),
            "tv_cost": tv_cost,
        }

    def _save(self, folder: Path, entry: Entry, prompt: int, seed: int, result: Result) -> list[str]:
        names = []
        for i, image in enumerate(result.images):
            names.append(f"{PICTURES}/{entry.slug}/{prompt:03d}-{seed + i}.png")
            save_png(image, folder / names[-1], result.stats.notes(self.prompts[prompt], seed + i))
        return names


def machine(pipe: Pipeline) -> dict[str, Any]:
    """Return the device, dtype and number of threads that decide seconds."""
    return {"device": device_name(pipe.device), "dtype": pipe.dtype, "threads": torch.get_num_threads()}


def facts(pipe: Pipeline, prompts: Sequence[str], seed: int, **others: Any) -> dict[str, Any]:
    """Return the facts that must be unchanged for a run to be resumed."""
    drawn = {"model": pipe.name, "weights": pipe.model.weights, "prompts": list(prompts), "seed": seed}
    return drawn | others | machine(pipe) | {"versions": versions()}


def check_run(folder: Path, run: Mapping[str, Any], remedy: str = FOLDER_REMEDY) -> None:
    """Write `run.json`, or compare the run with the folder's `run.json`; raise InputError, which names the differences."""
    if not (folder / RUN).exists():
        write_json(folder / RUN, run)
        return
    if differing := list(differences(read_object(folder / RUN, FOLDER_REMEDY), json.loads(json.dumps(run)))):
        raise InputError(
            f"{folder} holds a run with other settings ({'; '.join(differing)}); repeat them to go on, or {remedy}"
        )


def check_folder(folder: Path, by_size: bool, resume: bool) -> None:
    """Raise InputError if a folder holds a run that is not to be resumed, or whose batch sizes do not go with `by_size`."""
    own, other, word = (f"batch-*/{RUN}", RUN, "without") if by_size else (RUN, f"batch-*/{RUN}", "with")
    if any(folder.glob(other)):
        raise InputError(f"{folder} holds a run {word} --batch-sizes; {FOLDER_REMEDY}")
    if not resume and (runs := sorted(folder.glob(own))):
        raise InputError(
            f"{runs[0].parent} holds a run already; go on with it by --resume, or {FOLDER_REMEDY}"
        )
