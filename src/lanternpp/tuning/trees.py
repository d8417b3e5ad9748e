"""The tuning of a static tree: probes of some trees, a table of acceptances, costs, and the search for the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor

from lanternpp.engine.decode import Engine
from lanternpp.engine.verify.choose import BLOCK, TOKEN
from lanternpp.trees import shape_name
from lanternpp.trees.shapes import Shape, is_chain
from lanternpp.tuning.acceptance import Acceptances, Counts, CutChains
from lanternpp.tuning.cost import Costs, fit
from lanternpp.tuning.probe import Probe
from lanternpp.tuning.run import TUNED, Tuner
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

HAND_MADE = ("deep-8", "eagle-25", "lantern-57")  # shapes made by hand; shown and raced beside the tree found
NO_CUT = 1e-9  # of chains whose guesses are counted: it hardly ever ends one
SOME_CUT = 0.3  # of a chain that is timed beside a whole one
MAX_REPROBES = 3  # times that the tree found is probed and the search repeated
DEEPEST = max(len(path) for name in HAND_MADE for path in hand_made_shapes(32, 512)[name])


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


class TreeTuner(Tuner[Tuning]):
    """Tunes the static tree of a method."""

    def adapt(self, engine: Engine) -> None:
        """The cuts that are considered, and the limits of the table of acceptances."""
        given = self.options.given.get("min_survival")
        drafter = getattr(engine.proposer, "drafter", None)
        self.cuts: tuple[float, ...] = (given,) if given else CUTS  # that are considered for chains
        if given == 0 or self.settings.compile or getattr(drafter, "confidence", None) is None:
            self.cuts = ()
        only_chains = given or self.options.given.get("verify") == BLOCK  # of which there are no others
        self.ranks = 1 if only_chains else min(RANKS, self.pipe.target.vocab)
        self.levels = max(self.options.depth, DEEPEST)

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
        if cut and (self.options.given.get("min_survival") or cut.rate > best.rate * CUT_GAIN):
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
            key |= {"min_survival": cut} if cut else {}
            self.progress(self._done, self._done + rounds * count - len(made))
            draw = partial(self._probe, shape, cut, dials, prompt, turn)
            made.append(Probe(**self.journal.once(key, draw)))
            self._done += 1
        return made

    def _probe(
        self, shape: Shape, cut: float, dials: dict[str, Any], prompt: str, turn: int
    ) -> dict[str, Any]:
        """One batch by one tree. cut: 0 counts what all cuts would keep, where they are considered."""
        given = {**self._given, **dials, "tree": shape_name(shape)}
        if given.get("min_survival"):
            del given["min_survival"]
        cuts = self.cuts if is_chain(shape) and not cut else ()
        if cut or cuts:
            given["min_survival"] = cut = cut or NO_CUT
        return self.probed(given, shape, prompt, turn, cut, cuts)

    def chosen_dials(self, found: Tuning) -> dict[str, Any]:
        """The tree as `--tree` takes it, where chains may be cut how they are, and the dials that a budget chose."""
        cut = {"min_survival": found.chosen.min_survival} if self.cuts else {}
        return {**found.dials, "tree": shape_name(found.chosen.shape), **cut}

    def entrants(self, found: Tuning) -> dict[str, dict[str, Any]]:
        """The tree found, and the hand-made shapes with the same dials, but for chains alone where only those are searched."""
        dials = self.chosen_dials(found)
        others = () if self.options.given.get("verify") == BLOCK else HAND_MADE
        whole = {"min_survival": 0.0} if "min_survival" in self._given | dials else {}
        return {TUNED: dials, **{name: {**dials, "tree": name, **whole} for name in others}}

    def rows(self, found: Tuning) -> dict[str, dict[str, Any]]:
        """What is expected of all of them, by the same tables and costs."""
        shapes = hand_made_shapes(self.levels, self.ranks)
        made = {
            name: predict(shapes[name], found.tables, found.costs) for name in HAND_MADE if name in shapes
        }
        return {name: tree.row() for name, tree in {TUNED: found.chosen, **made}.items()}

    def figures(self, found: Tuning) -> dict[str, Any]:
        """The best tree of every size, the acceptances and the costs."""
        return {
            "sizes": [size.row() for size in found.sizes],
            "acceptance": {
                **acceptance(found.tables.trees, found.counts),
                "chains": acceptance(found.tables.chains, found.chains),
            },
            "costs": asdict(found.costs),
        }


def acceptance(table: Tensor, counts: Counts) -> dict[str, Any]:
    """A table of acceptances, and what it was made from."""
    return {"table": table.tolist(), "tried": counts.tried.tolist(), "kept": counts.kept.tolist()}
