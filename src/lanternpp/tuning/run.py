"""A tuning: probe some trees, search for the fastest, probe that one too, and race it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from lanternpp.dials import ENGINE, SAMPLING, names
from lanternpp.engine.verifiers import BLOCK, TOKEN
from lanternpp.errors import InputError
from lanternpp.evaluation import report
from lanternpp.evaluation.draw import evaluation_requests
from lanternpp.evaluation.speed import Entry, Race, device_name
from lanternpp.methods import BASELINE
from lanternpp.nn.checkpoints import digest
from lanternpp.pipeline import Pipeline, versions
from lanternpp.settings import Settings, dials_read
from lanternpp.trees import build_tree, shape_name
from lanternpp.trees.shapes import Shape, is_chain
from lanternpp.trees.static import StaticTree
from lanternpp.tuning.acceptance import Acceptances, Counts, CutChains
from lanternpp.tuning.cost import Costs, fit
from lanternpp.tuning.journal import RACE, Journal
from lanternpp.tuning.probe import Probe, probe
from lanternpp.tuning.search import (
    CUT_GAIN,
    CUTS,
    RANKS,
    PredictedTree,
    best_by_size,
    best_cut,
    choose,
    hand_made_shapes,
    predict,
    probe_shapes,
)

SHARED = names(ENGINE, SAMPLING)  # dials that every engine of a tuning shares, the plain one too
HAND_MADE = ("deep-8", "eagle-25", "lantern-57")  # shapes made by hand; shown and raced beside the tree found
NO_CUT = 1e-9  # of chains whose guesses are counted: it hardly ever ends one
SOME_CUT = 0.3  # of a chain that is timed beside a whole one
MAX_REPROBES = 3  # times that the tree found is probed and the search repeated
DEEPEST = max(len(path) for name in HAND_MADE for path in hand_made_shapes(32, 512)[name])
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TuningOptions:
    """What is tuned, and how thoroughly."""

    method: str
    given: Mapping[str, Any]  # overrides
    prompts: Sequence[str]
    rounds: int = 3  # how often each tree is probed
    pictures: int = 8  # of each entrant of the race; 0: no race
    nodes: int = 64  # below the root, at most
    depth: int = 16
    seed: int = 0


@dataclass(frozen=True)
class Tuning:
    """What was found for one choice of dials."""

    dials: dict[str, Any]  # overrides beyond those of the options
    counts: Counts  # of trees that branch, and of chains where both are verified alike
    chains: Counts  # of chains, likewise
    tables: Acceptances
    costs: Costs
    sizes: list[PredictedTree]
    chosen: PredictedTree


class Tuner:
    """Tunes a method of a pipeline that was made with `tuned=False`, logging what it measures.

    Raises InputError where the method does not draft on a static tree, or a number is out of range.
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
        self.settings = pipe.settings(options.method, **({"batch_size": 1} | dict(options.given)))
        self.shared = {name: getattr(self.settings, name) for name in SHARED}
        check(self.settings)
        for prompt in options.prompts:
            pipe.target.check(prompt)
        engine = pipe.new_engine(self.settings)  # so that a wrong part is found before anything is drawn
        if pipe.target.channels:
            raise InputError(f"{pipe.name} draws continuous latents, and tuning is for models of codes")
        given = options.given.get("cut")
        drafter = getattr(engine.proposer, "drafter", None)
        self.cuts: tuple[float, ...] = (given,) if given else CUTS  # that are considered for chains
        if given == 0 or self.settings.compile or getattr(drafter, "confidence", None) is None:
            self.cuts = ()
        only_chains = given or options.given.get("verify") == BLOCK  # of which there are no others
        self.ranks = 1 if only_chains else min(RANKS, pipe.target.vocab)
        self.levels = max(options.depth, DEEPEST)
        self.journal = Journal(folder, self.describe(), restart)
        self.folder = folder
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
            "processor": processor(),
            "threads": torch.get_num_threads(),
        }
        return facts | self.pipe.conditions(self.settings)

    def tune(self, dials: dict[str, Any] | None = None, few: bool = False) -> Tuning:
        """Probe, search, and probe what was found until it is found again, at most `AGAIN` times.

        dials: overrides beyond those of the options. few: probe fewer trees with them, as the cost of drafting and of
        passes is known from probes without them.
        """
        chosen, options = dict(dials or {}), self.options
        limits = options.nodes, options.depth
        before = self._probes({}, probe_shapes(*limits, ranks=self.ranks), "probe") if few else []
        drawn = self._probes(chosen, probe_shapes(*limits, few, self.ranks), "probe")
        found = self._search(chosen, before, drawn)
        for repeat in range(MAX_REPROBES):
            if any(found.chosen.shape == one.paths for one in drawn):
                break
            drawn += self._probes(chosen, [found.chosen.shape], f"again {repeat}")
            found = self._search(chosen, before, drawn)
        return found

    def _search(self, dials: dict[str, Any], before: list[Probe], drawn: list[Probe]) -> Tuning:
        options = self.options
        limits = options.nodes, options.depth
        counts, chains = self._counts(drawn)
        tables = Acceptances(counts.table(), chains.table())
        costs = fit([*before, *drawn], self.pipe.target.length, drawn)
        sizes = best_by_size(tables, costs, *limits)
        best = choose(sizes, tables, costs, *limits)
        found = CutChains.of(self.cuts, [one.cuts for one in drawn if one.cuts])
        cut = best_cut(found, costs, *limits) if found else None
        if cut and (self.options.given.get("cut") or cut.rate > best.rate * CUT_GAIN):
            best = cut
        return Tuning(dials, counts, chains, tables, costs, sizes, best)

    def _counts(self, drawn: Sequence[Probe]) -> tuple[Counts, Counts]:
        """What trees kept and what chains kept; all together for both where both were verified from the root, or neither was."""
        whole = [one for one in drawn if one.nodes is None]
        parts = [[one for one in whole if is_chain(one.paths) == chained] for chained in (False, True)]
        if len({one.verify == TOKEN for one in whole}) == 1 or not all(parts):
            parts = [whole, whole]
        trees, chains = (
            Counts.of([(one.tried, one.kept) for one in part], self.levels, self.ranks) for part in parts
        )
        return trees, chains

    def _probes(self, dials: dict[str, Any], shapes: Sequence[Shape], stage: str) -> list[Probe]:
        """Every shape in turn, as often as the options say; another one first each time."""
        made: list[Probe] = []
        longest = max((shape for shape in shapes if is_chain(shape)), key=len, default=())
        field = [(shape, 0.0) for shape in shapes]
        if self.cuts and stage == "probe" and len(longest) > 1:
            field.append((longest, SOME_CUT))  # tells what a guess costs that is not drawn
        rounds, count = self.options.rounds, len(field)
        for turn, i in product(range(rounds), range(count)):
            place = (turn + i) % count
            shape, cut = field[place]
            prompt = self.options.prompts[(turn * count + place) % len(self.options.prompts)]
            key = {"stage": stage, "dials": dials, "tree": shape_name(shape), "round": turn}
            key |= {"cut": cut} if cut else {}
            self.progress(self._done, self._done + rounds * count - len(made))
            draw = partial(self._probe, shape, cut, dials, prompt, turn)
            made.append(Probe(**self.journal.once(key, draw)))
            self._done += 1
        return made

    def _probe(
        self, shape: Shape, cut: float, dials: dict[str, Any], prompt: str, turn: int
    ) -> dict[str, Any]:
        """One batch by one tree, in an engine of its own. cut: 0 counts what all cuts would keep, where they are considered."""
        given = {**self.shared, **self.options.given, **dials, "tree": shape_name(shape)}
        if given.get("cut"):
            del given["cut"]
        cuts = self.cuts if is_chain(shape) and not cut else ()
        if cut or cuts:
            given["cut"] = cut = cut or NO_CUT
        settings = self.pipe.settings(self.options.method, **given)
        engine = self.pipe.new_engine(settings)
        plain = self.pipe.new_engine(self.pipe.settings(BASELINE, **self.shared))
        seeds = [self.options.seed + turn * engine.batch + i for i in range(engine.batch)]
        prompts, verify = [prompt] * engine.batch, settings.verify or TOKEN
        drawn = probe(engine, plain, shape, prompts, seeds, self.pipe.images, verify, cut, cuts)
        return drawn.to_json()

    def race(self, found: Tuning, measure: bool = False) -> list[dict[str, Any]]:
        """The tree found, plain decoding and the hand-made shapes, taking turns: a row of figures for each."""
        batch = self.settings.batch_size
        count = max(1, self.options.pictures // batch)  # batches
        prompts = list(
            dict.fromkeys(request.prompt for request in evaluation_requests(self.options.prompts, count, 0))
        )
        overrides = {name: value for name, value in self.options.given.items() if name not in SHARED}
        overrides |= found.dials
        overrides.pop("cut", None)
        trees: dict[str, dict[str, Any]] = {"tuned": self.tuned(found)}
        if overrides.get("verify") != BLOCK:
            trees |= {name: {"tree": name} for name in HAND_MADE}
        field = [Entry(BASELINE, BASELINE, {})]
        field += [Entry(label, self.options.method, {**overrides, **own}) for label, own in trees.items()]
        n = max(1, count // len(prompts)) * batch
        race = Race(self.pipe, field, prompts, n, self.options.seed + 1000, self.shared, measure)
        name = self.slug(f"{sorted(trees['tuned'].items())} {sorted(found.dials.items())} {n} {prompts}")
        return report.rows(
            race.run(self.folder / RACE / name, resume=True, progress=self.progress), race.describe(), {}
        )

    def tuned(self, found: Tuning) -> dict[str, Any]:
        """The tree that was found, as `--tree` takes it, and where chains may be cut how they are."""
        return {"tree": shape_name(found.chosen.shape)} | ({"cut": found.chosen.cut} if self.cuts else {})

    @staticmethod
    def slug(text: str) -> str:
        """A short name for a folder or file."""
        return digest([text])

    def hand_made(self, found: Tuning) -> dict[str, PredictedTree]:
        """What is expected of the hand-made shapes, by the same table and costs."""
        shapes = hand_made_shapes(self.levels, self.ranks)
        return {
            name: predict(shapes[name], found.tables, found.costs) for name in HAND_MADE if name in shapes
        }


def check(settings: Settings) -> None:
    """InputError unless a method drafts on a static tree."""
    if "tree" not in dials_read(settings.proposer, settings.accept) or settings.tree is None:
        raise InputError(
            f"method {settings.method!r} has no draft tree to tune; use one that has, such as eagle or lantern++"
        )
    if not isinstance(build_tree(settings.tree), StaticTree):
        raise InputError(
            f"method {settings.method!r} drafts on the dynamic tree {settings.tree!r}, and tune finds static ones; "
            "use eagle, lantern-static, lantern++ or cool"
        )


def processor() -> str:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"
