"""A tuning: probe some drafts, search for the fastest, and race it. `trees.py` has the search for trees, `windows.py` for Jacobi methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from lanternpp.api.fit.store import machine_facts
from lanternpp.api.options import BASELINE, EngineDials, SamplingDials, Settings, names
from lanternpp.api.pipeline import Pipeline, versions
from lanternpp.api.settings import dials_read
from lanternpp.engine.decode import Engine
from lanternpp.engine.verify.choose import TOKEN
from lanternpp.errors import InputError
from lanternpp.evaluation import report
from lanternpp.evaluation.draw import evaluation_requests
from lanternpp.evaluation.speed import Entry, Race
from lanternpp.trees import build_tree
from lanternpp.trees.shapes import Shape
from lanternpp.trees.static import StaticTree
from lanternpp.tuning.journal import RACE, Journal
from lanternpp.tuning.probe import probe
from lanternpp.util.devices import device_name
from lanternpp.util.files import digest

SHARED = names(EngineDials, SamplingDials)  # dials that every engine of a tuning shares, the plain one too
TUNED = "tuned"  # the label of what was found
Progress = Callable[[int, int], None]
T = TypeVar("T")  # what a tuner finds


@dataclass(frozen=True)
class TuningOptions:
    """What is tuned, and how thoroughly."""

    method: str
    given: Mapping[str, Any]  # overrides
    prompts: Sequence[str]
    rounds: int = 3  # how often each tree is probed
    pictures: int = 8  # of each entrant of the race; 0: no race
    nodes: int = 64  # below the root, at most
    depth: int = 16  # levels at most, or guesses of a window
    seed: int = 0


class Tuner(ABC, Generic[T]):
    """Tunes a method of a pipeline that was made with `tuned=False`, logging what it measures.

    Raises InputError where the method has nothing to tune, or a number is out of range.
    """

    def __init__(
        self,
        pipe: Pipeline,
        options: TuningOptions,
        folder: Path,
        restart: bool = False,
        progress: Progress | None = None,
    ):
        self.pipe, self.options, self.progress = pipe, options, progress or (lambda done, total: None)
        self.settings = pipe.settings(
            options.method, **({"batch_size": 1, "fit": False} | dict(options.given))
        )
        self.shared = {name: getattr(self.settings, name) for name in SHARED}
        check(self.settings)
        for prompt in options.prompts:
            pipe.target.check(prompt)
        engine = pipe.new_engine(self.settings)  # so that a wrong part is found before anything is drawn
        if pipe.target.channels:
            raise InputError(f"{pipe.name} draws continuous latents, and tuning is for models of codes")
        self.adapt(engine)
        self.journal = Journal(folder, self.describe(), restart)
        self.folder = folder
        self._given = {name: value for name, value in options.given.items() if name not in SHARED}
        self._done = 0

    def describe(self) -> dict[str, Any]:
        """What must be unchanged for a tuning to be resumed."""
        options = self.options
        facts: dict[str, Any] = {
            "tuned": options.method,
            "model": self.pipe.name,
            "settings": asdict(self.settings),
        }
        facts |= {
            "prompts": list(options.prompts),
            "nodes": options.nodes,
            "depth": options.depth,
            "seed": options.seed,
        }
        assert self.pipe.tuned is None
        return facts | {"rounds": options.rounds, "machine": self.machine(), "versions": versions()}

    def machine(self) -> dict[str, Any]:
        """Where the seconds were measured."""
        like = next(self.pipe.target.parameters())
        facts = {
            "name": device_name(like.device),
            "processor": machine_facts()["processor"],
            "threads": torch.get_num_threads(),
        }
        return facts | self.pipe.conditions(self.settings)

    def adapt(self, engine: Engine) -> None:
        """Keep what depends on the parts of the method's engine."""

    @abstractmethod
    def chosen_dials(self, found: T) -> dict[str, Any]:
        """What was found, as overrides."""

    @abstractmethod
    def entrants(self, found: T) -> dict[str, dict[str, Any]]:
        """What is raced beside plain decoding, as overrides by label; what was found is called `TUNED`."""

    @abstractmethod
    def rows(self, found: T) -> dict[str, dict[str, Any]]:
        """What is expected of the entrants, as far as it is, by label."""

    @abstractmethod
    def figures(self, found: T) -> dict[str, Any]:
        """What the report says of the search."""

    def race(self, found: T, measure_tv: bool = False) -> list[dict[str, Any]]:
        """The entrants and plain decoding, taking turns: a row of figures for each."""
        batch = self.settings.batch_size
        count = max(1, self.options.pictures // batch)  # batches
        prompts = list(
            dict.fromkeys(request.prompt for request in evaluation_requests(self.options.prompts, count, 0))
        )
        entrants = self.entrants(found)
        field = [Entry(BASELINE, BASELINE, {})]
        field += [Entry(label, self.options.method, self._given | own) for label, own in entrants.items()]
        n = max(1, count // len(prompts)) * batch
        race = Race(self.pipe, field, prompts, n, self.options.seed + 1000, self.shared, measure_tv)
        name = self.slug(f"{sorted(entrants[TUNED].items())} {n} {prompts}")
        return report.rows(
            race.run(self.folder / RACE / name, resume=True, progress=self.progress), race.describe(), {}
        )

    def probed(
        self,
        given: Mapping[str, Any],
        shape: Shape,
        prompt: str,
        turn: int,
        min_survival: float = 0.0,
        cuts: tuple[float, ...] = (),
    ) -> dict[str, Any]:
        """One batch drawn with these overrides, in an engine of its own; cut and cuts as in `probe`."""
        settings = self.pipe.settings(self.options.method, **self.shared, **given)
        engine, verify = self.pipe.new_engine(settings), settings.verify or TOKEN
        plain = self.pipe.new_engine(self.pipe.settings(BASELINE, **self.shared))
        seeds = [self.options.seed + turn * engine.batch + i for i in range(engine.batch)]
        prompts = [prompt] * engine.batch
        return probe(
            engine, plain, shape, prompts, seeds, self.pipe.images, verify, min_survival, cuts
        ).to_json()

    @staticmethod
    def slug(text: str) -> str:
        """A short name for a folder or file."""
        return digest([text])


def check(settings: Settings) -> None:
    """InputError unless a method drafts on a static tree or in a window."""
    read = dials_read(settings.proposer, settings.accept)
    if has_window(settings):
        return
    if "tree" not in read or settings.tree is None:
        raise InputError(
            f"method {settings.method!r} has no draft to tune; use one with a tree or a window, such as eagle, lantern++ or "
            "jacobi-coupled"
        )
    if not isinstance(build_tree(settings.tree), StaticTree):
        raise InputError(
            f"method {settings.method!r} drafts on the dynamic tree {settings.tree!r}, and tune finds static ones; "
            "use eagle, lantern-static, lantern++ or cool"
        )


def has_window(settings: Settings) -> bool:
    """Whether a method drafts in a window instead of a tree."""
    return {"window", "tree"} & dials_read(settings.proposer, settings.accept) == {"window"}
