"""Which window of a Jacobi method is fastest: every dial is tried in turn, on the same pictures.

A tree's codes are predicted from how often its children are kept. That does not hold for a window, as every pass that a guess
spends in it improves the guess. So the codes that a pass decides are measured for every window that is tried, and so is what a
pass takes; both are smoothed, as more guesses neither decide fewer codes nor take less time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from lanternpp.api.pipeline import Pipeline
from lanternpp.api.settings import dials_read
from lanternpp.errors import InputError
from lanternpp.trees.shapes import chain
from lanternpp.tuning.cost import Curve, PictureCosts, rising
from lanternpp.tuning.probe import Probe
from lanternpp.tuning.run import TUNED, Progress, Tuner, TuningOptions, has_window
from lanternpp.tuning.trees import TreeTuner

SEARCHED: dict[str, tuple[Any, ...]] = {  # in the order in which they are tried, besides the method's own
    "window": (2, 4, 6, 8, 11, 16, 22, 32),
    "alternatives": (0, 1, 3, 6),
    "init": ("mixed", "above", "last", "uniform"),
    "window_rows": (1, 2),
}
TURNS = 2  # over all dials, at most
OWN = "default"  # the label of the method's own window
Dials = dict[str, Any]


@dataclass(frozen=True)
class WindowCosts(PictureCosts):
    """What the steps of a method with a window take."""

    look: Curve  # a whole step, by its nodes, the root among them


@dataclass(frozen=True)
class MeasuredWindow:
    """The dials of a window and what was measured with them."""

    dials: Dials
    nodes: int  # behind the root
    codes: float  # that a pass decides
    per_pass: float  # codes per pass of whole pictures, the prefill among the passes
    rate: float  # codes per second
    speedup: float

    def row(self) -> dict[str, Any]:
        """A plain dictionary, with the keys of `PredictedTree.row` as far as they apply."""
        return {
            "nodes": self.nodes,
            "depth": self.dials["window"],
            "codes_per_draft": self.codes,
            "codes_per_pass": self.per_pass,
            "codes_per_second": self.rate,
            "speedup": self.speedup,
            "dials": self.dials,
        }


@dataclass(frozen=True)
class WindowTuning:
    """What was found."""

    costs: WindowCosts
    tried: list[MeasuredWindow]  # by their nodes
    chosen: MeasuredWindow


class WindowTuner(Tuner[WindowTuning]):
    """Tunes window, siblings, fresh guesses and rows of a method; those that the options give stay as they are."""

    def tune(self) -> WindowTuning:
        """Try the values of every dial in turn, the others as they are best so far, until a turn changes nothing."""
        values = self._values()
        least, own = {name: tried[0] for name, tried in values.items()}, self._own(values)
        if self._nodes(least) > self.options.nodes:
            said = ", ".join(f"{name} {value}" for name, value in least.items())
            raise InputError(f"--nodes {self.options.nodes} are fewer than those of {said}; allow more")
        best = own if self._nodes(own) <= self.options.nodes else least
        drawn: list[tuple[Dials, list[Probe]]] = []
        for _ in range(TURNS):
            before = best
            for name, tried in values.items():
                field = [best | {name: value} for value in tried]
                field = [dials for dials in field if self._nodes(dials) <= self.options.nodes]
                known = [dials for dials, _ in drawn]
                new = [dials for dials in field if dials not in known]
                drawn += zip(new, self._measured(new), strict=True)
                best = max(self._found(drawn)[1], key=lambda found: found.rate).dials
            if best == before:
                break
        costs, windows = self._found(drawn)
        return WindowTuning(costs, windows, next(found for found in windows if found.dials == best))

    def chosen_dials(self, found: WindowTuning) -> Dials:
        """The window that was found, and its other dials."""
        return found.chosen.dials

    def entrants(self, found: WindowTuning) -> dict[str, Dials]:
        """The window that was found, and the method's own where that is another one that was tried."""
        own = self._own(self._values())
        other = own != found.chosen.dials and any(window.dials == own for window in found.tried)
        return {TUNED: found.chosen.dials} | ({OWN: own} if other else {})

    def rows(self, found: WindowTuning) -> dict[str, dict[str, Any]]:
        """What was measured of both."""
        row_of = {self.slug(str(window.dials)): window.row() for window in found.tried}
        return {label: row_of[self.slug(str(dials))] for label, dials in self.entrants(found).items()}

    def figures(self, found: WindowTuning) -> dict[str, Any]:
        """All windows that were tried, and the costs."""
        return {"sizes": [window.row() for window in found.tried], "costs": asdict(found.costs)}

    def _values(self) -> dict[str, tuple[Any, ...]]:
        """The values of every dial that are tried: the one that was given, else what the model and the options allow."""
        target, given, options = self.pipe.target, self.options.given, self.options
        read = dials_read(self.settings.proposer, self.settings.accept)
        most = {
            "window": min(options.depth, target.length // 2),
            "alternatives": target.vocab - 1,
            "window_rows": -(-target.length // target.width),
        }
        found: dict[str, tuple[Any, ...]] = {}
        for name, values in SEARCHED.items():
            if name in read and given.get(name) is not None:
                found[name] = (given[name],)
            elif name in read:
                allowed = {*values, getattr(self.settings, name)} - {None}
                kept = [value for value in allowed if name not in most or value <= most[name]]
                first = values.index if name == "init" else int
                found[name] = tuple(sorted(kept, key=first)) or (most[name],)
        return found

    def _own(self, values: Mapping[str, Sequence[Any]]) -> Dials:
        """The method's own dials, as far as they are tried."""
        own = {name: getattr(self.settings, name) for name in values}
        return {name: own[name] if own[name] in tried else tried[0] for name, tried in values.items()}

    @staticmethod
    def _nodes(dials: Mapping[str, Any]) -> int:
        """Guesses of a pass."""
        guesses: int = dials["window"] * dials.get("window_rows", 1) + dials.get("alternatives", 0)
        return guesses

    def _measured(self, field: Sequence[Dials]) -> list[list[Probe]]:
        """Probes of every entry, taking turns; in a turn all have the same prompt and seeds."""
        drawn, rounds = [list[Probe]() for _ in field], range(self.options.rounds)
        for turn, (dials, probes) in product(rounds, list(zip(field, drawn, strict=True))):
            self.progress(self._done, self._done + len(rounds) * len(field) - len(drawn[0]))
            key = {"stage": "window", "dials": dials, "round": turn}
            probes.append(Probe(**self.journal.once(key, partial(self._probe, dials, turn))))
            self._done += 1
        return drawn

    def _probe(self, dials: Dials, turn: int) -> dict[str, Any]:
        """One batch with these dials."""
        shape = (*chain(dials["window"]), *((rank,) for rank in range(1, 1 + dials.get("alternatives", 0))))
        prompt = self.options.prompts[turn % len(self.options.prompts)]
        return self.probed({**self._given, **dials}, shape, prompt, turn)

    def _found(self, drawn: Sequence[tuple[Dials, list[Probe]]]) -> tuple[WindowCosts, list[MeasuredWindow]]:
        """The costs, and the windows in the order of their nodes."""
        every = [one for _, probes in drawn for one in probes]
        plain = median(one.plain_step for one in every)
        steps: dict[int, list[float]] = {1: [plain]}
        for dials, probes in drawn:
            took = [(one.draft + one.look + one.judge) * plain / one.plain_step for one in probes]
            steps.setdefault(self._nodes(dials) + 1, []).extend(took)
        at = tuple(sorted(steps))
        curve = Curve(at, rising([median(steps[n]) for n in at], [len(steps[n]) for n in at]))
        begin, plain_begin = median(one.begin for one in every), median(one.plain_begin for one in every)
        pixels = median(one.pixels for one in every)
        costs = WindowCosts(self.pipe.target.length, plain, plain_begin, begin, pixels, curve)
        groups: dict[str, list[tuple[Dials, list[Probe]]]] = {}  # by all dials but the window
        for dials, probes in sorted(drawn, key=lambda entry: entry[0]["window"]):
            groups.setdefault(str({**dials, "window": 0}), []).append((dials, probes))
        windows = []
        for group in groups.values():
            passes = [sum(one.passes for one in probes) for _, probes in group]
            decided = [sum(one.codes for one in probes) for _, probes in group]
            codes = rising([n / count for n, count in zip(decided, passes, strict=True)], passes)
            windows += [
                self._window(dials, kept, costs) for (dials, _), kept in zip(group, codes, strict=True)
            ]
        return costs, sorted(windows, key=lambda window: window.nodes)

    def _window(self, dials: Dials, codes: float, costs: WindowCosts) -> MeasuredWindow:
        nodes = self._nodes(dials)
        step = costs.look(nodes + 1)
        return MeasuredWindow(
            dials, nodes, codes, costs.per_pass(codes), codes / step, costs.gain(step, codes)
        )


def tuner_for(
    pipe: Pipeline,
    options: TuningOptions,
    folder: Path,
    restart: bool = False,
    progress: Progress | None = None,
) -> TreeTuner | WindowTuner:
    """What tunes a method: its window, or its tree. Arguments and errors are those of `Tuner`."""
    window = has_window(pipe.settings(options.method, **options.given))
    return (WindowTuner if window else TreeTuner)(pipe, options, folder, restart, progress)
