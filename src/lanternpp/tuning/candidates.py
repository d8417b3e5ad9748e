"""The search space of a tuning: the parameters of a trial, the overrides that follow from them, and how one candidate is drawn and timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.api.fit import warm_step
from lanternpp.api.options import Settings
from lanternpp.api.pipeline import Pipeline
from lanternpp.api.settings import dials_read, greatest
from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import AcceptanceByRank, TimedEngine, now, trimmed
from lanternpp.engine.verify.choose import BLOCK
from lanternpp.errors import InputError
from lanternpp.evaluation.equal import STRENGTHS
from lanternpp.trees import shape_name, static_shape
from lanternpp.trees.search import best_tree, expected
from lanternpp.trees.static import Shape, chain, is_chain
from lanternpp.tuning.options import TuningOptions

if TYPE_CHECKING:
    from optuna.trial import Trial

CHAIN, SEARCHED = "chain", "searched"  # shapes of a draft, beside those of `SHAPES`
HAND_MADE = ("deep-8", "eagle-25", "lantern-57")
WINDOWS: dict[str, tuple[Any, ...]] = {  # values of a window's dials
    "window": (1, 32),
    "alternatives": (0, 6),
    "init": ("mixed", "above", "last", "uniform"),
    "window_rows": (1, 2),
}
NEIGHBOURS = (5, 10, 100, 1000)
MOST_SURVIVAL = 0.7
RANKS = 16  # children of a node that the search for a tree considers
EACH = 5  # timed steps of a candidate for one of plain decoding
PRIOR = 20.0  # trials that an acceptance seen at all depths counts beside those of one depth

Counts = tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]
"""Children verified and accepted, [depth][rank] each."""
Seen = Sequence[tuple[Mapping[str, Any], Counts]]
"""Overrides that were drawn, and what was counted."""


class Space:
    """The candidates for one method: trees or windows within the limits of the options, and the strength of its rule under a budget.

    given: overrides of the user, which stay as they are. engine: one of the method. Raises InputError where nothing can be chosen.
    """

    def __init__(
        self,
        pipe: Pipeline,
        settings: Settings,
        given: Mapping[str, Any],
        engine: Engine,
        options: TuningOptions,
    ):
        self.pipe, self.settings, self.given = pipe, settings, given
        self.nodes, self.depth = options.nodes, options.depth
        drafter = getattr(engine.proposer, "drafter", None)
        predicts = getattr(drafter, "confidence", None) is not None
        self.ends_early = predicts and not settings.compile and given.get("min_survival") is None
        read = dials_read(settings.proposer, settings.accept)
        self.strengths: tuple[str, ...] = ()  # the dials of the rule that are chosen
        if options.limited:
            if settings.accept not in STRENGTHS:
                raise InputError(
                    f"a budget picks the strength of a relaxed rule, which the rule {settings.accept!r} has not; use lantern++"
                )
            every = ("neighbours", STRENGTHS[settings.accept][0])
            self.strengths = tuple(name for name in every if name in read and given.get(name) is None)
        # the dials of a window that the method reads, and the least value of each
        self.least = {name: values[0] for name, values in WINDOWS.items() if name in read}
        least = self.least | {name: given[name] for name in WINDOWS if given.get(name) is not None}
        if has_window(settings) and window_nodes(least) > self.nodes:
            said = ", ".join(f"{name} {value}" for name, value in least.items())
            raise InputError(f"--nodes {self.nodes} are fewer than those of {said}; allow more")
        self.shapes = [CHAIN]  # of drafts on a tree
        if not given.get("min_survival") and given.get("verify") != BLOCK:
            named = {name: static_shape(name) or () for name in (settings.tree, *HAND_MADE) if name}
            fitting = [name for name, shape in named.items() if not is_chain(shape) and self.fits(shape)]
            self.shapes += [SEARCHED, *fitting]

    def fits(self, shape: Shape) -> bool:
        """Whether a shape lies within the limits."""
        ranks = max(map(max, shape)) < self.pipe.target.vocab
        return len(shape) <= self.nodes and max(map(len, shape)) <= self.depth and ranks

    def first(self) -> list[dict[str, Any]]:
        """Parameters of trials to begin with: the method's own draft, the hand-made trees, and chains."""
        drafts: list[dict[str, Any]]
        if has_window(self.settings):
            own = {name: getattr(self.settings, name) for name in self.least}
            known = {name: value for name, value in own.items() if value is not None}
            drafts = [known | {"window": size} for size in (known["window"], 2, 4, 8, 16, 32)]
        else:
            deepest, never = min(self.depth, self.nodes), {"min_survival": 0.0} if self.ends_early else {}
            drafts = [{"shape": CHAIN, "chain": n, **never} for n in (1, 2, 4, 6, 9, 13) if n <= deepest]
            drafts += [{"shape": shape} for shape in self.shapes[2:]]
            sizes = [n for n in (4, 8, 16, 32, 64) if n <= self.nodes and SEARCHED in self.shapes]
            drafts += [{"shape": SEARCHED, "nodes": n, "levels": self.depth} for n in sizes]
        strong = {name: getattr(self.settings, name) for name in self.strengths}
        return [draft | strong for draft in drafts]

    def codes(self, overrides: Mapping[str, Any], seen: Seen) -> float | None:
        """Codes that a draft on a tree decides, from all drafts of its kind; None of a window, and of chains that end early.

        That a child is accepted depends on its depth and rank and not on the tree around it, so that a few pictures of every draft
        tell more of each than its own.
        """
        shape = static_shape(overrides["tree"]) if "tree" in overrides else None
        if not shape or overrides.get("min_survival"):
            return None
        mine = self._kind(overrides)
        table = acceptance_table(
            [counts for other, counts in seen if self._kind(other) == mine],
            max(map(len, shape)),
            1 + max(map(max, shape)),
        )
        return expected(table, shape)

    def _kind(self, overrides: Mapping[str, Any]) -> tuple[Any, ...]:
        """What else acceptance depends on: the strength of the rule, and whether a draft is a chain, which ends early or not."""
        chain_like = is_chain(static_shape(overrides["tree"]) or ())
        strengths = (overrides.get(name) for name in self.strengths)
        return (chain_like, bool(overrides.get("min_survival")), *strengths)

    def overrides(self, trial: Trial, seen: Seen) -> dict[str, Any] | None:
        """The overrides of a trial; None where they are outside the limits. seen: of earlier trials."""
        found: dict[str, Any] = {}
        for name in self.strengths:
            if name == "neighbours":
                known = {k for k in NEIGHBOURS if k < self.pipe.target.vocab} | {self.settings.neighbours}
                found[name] = trial.suggest_categorical(name, sorted(known))
            else:
                _, exact, most = STRENGTHS[self.settings.accept]
                found[name] = trial.suggest_float(name, exact, min(most, 10.0))
        if has_window(self.settings):
            return self._window(trial, found)
        kind = trial.suggest_categorical("shape", self.shapes)
        if kind == CHAIN:
            shape = chain(trial.suggest_int("chain", 1, min(self.depth, self.nodes)))
            if self.ends_early:
                found["min_survival"] = trial.suggest_float("min_survival", 0.0, MOST_SURVIVAL, step=0.05)
        elif kind == SEARCHED:
            nodes = trial.suggest_int("nodes", 1, self.nodes, log=True)
            shape = self._best_tree(nodes, trial.suggest_int("levels", 1, self.depth), seen)
        else:
            return found | {"tree": kind}
        return found | {"tree": shape_name(shape)}

    def _window(self, trial: Trial, found: dict[str, Any]) -> dict[str, Any] | None:
        target = self.pipe.target
        most = greatest(target) | {"window": min(self.depth, target.length // 2)}
        for name, least in self.least.items():
            if self.given.get(name) is not None:
                found[name] = self.given[name]
            elif isinstance(least, str):
                found[name] = trial.suggest_categorical(name, WINDOWS[name])
            else:
                found[name] = trial.suggest_int(name, least, max(least, min(WINDOWS[name][1], most[name])))
        return found if window_nodes(found) <= self.nodes else None

    def _best_tree(self, nodes: int, levels: int, seen: Seen) -> Shape:
        """The tree with the most expected codes, by Sequoia's dynamic programme over the acceptance seen so far."""
        counts = [counted for _, counted in seen]
        table = acceptance_table(counts, self.depth, min(RANKS, self.pipe.target.vocab))
        return best_tree(table, nodes, levels)


def acceptance_table(seen: Sequence[Counts], depth: int, ranks: int) -> Tensor:
    """Acceptance [depth, ranks] from counts; where few children were verified, that of their rank at all depths."""
    total = torch.zeros(2, depth, ranks, dtype=torch.float64)
    for counts in seen:
        table = torch.tensor(counts, dtype=torch.float64)
        # a negative width removes what lies beyond
        total += F.pad(table, (0, ranks - table.shape[2], 0, depth - table.shape[1]))
    tried, kept = total
    prior = 0.5 / torch.arange(1, ranks + 1, dtype=torch.float64)
    by_rank = (kept.sum(0) + prior) / (tried.sum(0) + 1)
    return ((kept + PRIOR * by_rank) / (tried + PRIOR)).clamp(1e-4, 1 - 1e-4)


def has_window(settings: Settings) -> bool:
    """Whether a method drafts in a window instead of a tree."""
    return {"window", "tree"} & dials_read(settings.proposer, settings.accept) == {"window"}


def window_nodes(dials: Mapping[str, Any]) -> int:
    """Draft codes of a pass."""
    return dials["window"] * dials.get("window_rows", 1) + dials.get("alternatives", 0)


def check(settings: Settings) -> None:
    """InputError unless a method drafts on a static tree or in a window."""
    if has_window(settings):
        return
    if "tree" not in dials_read(settings.proposer, settings.accept) or settings.tree is None:
        raise InputError(
            f"method {settings.method!r} has no draft to tune; use one with a tree or a window, such as eagle, lantern++ or "
            "jacobi-coupled"
        )
    if not static_shape(settings.tree):
        raise InputError(
            f"method {settings.method!r} drafts on the dynamic tree {settings.tree!r}, and tune finds static ones; "
            "use eagle, lantern-static, lantern++ or cool"
        )


class PlainEngine(TimedEngine):
    """Plain decoding beside which candidates are timed: a step for every `EACH` of theirs.

    Both meet the same machine then: what else runs there, and how warm it is, matters little to their ratio.
    """

    def __init__(self, pipe: Pipeline, settings: Settings, prompt: str | None):
        super().__init__(pipe.new_engine(settings))
        prefill = self.admit([prompt] * settings.batch_size, range(settings.batch_size))
        self.midway_step(first=True)
        self.prefill_steps = prefill / self.midway_step()[0]


def draw(
    pipe: Pipeline, settings: Settings, plain: PlainEngine, prompt: str | None, seeds: Sequence[int]
) -> dict[str, Any]:
    """Draw a batch in an engine of its own, timing every other step: a row of figures for the log of a tuning.

    step, plain_step: seconds. outside: seconds of a picture's prefill and pixels. plain: seconds of a picture by plain decoding, with
    both. tried, kept: children verified and accepted, [depth, rank].
    """
    engine, length = pipe.new_engine(settings), pipe.target.length
    timed, counts = TimedEngine(engine), AcceptanceByRank(length)
    prefill = timed.admit([prompt] * engine.batch, seeds)
    steps, plain_steps = list[float](), list[float]()
    while len(engine.done()) < engine.batch:
        # One step is counted and the next one is timed, as the kernels compute a step in one call only where nothing observes it.
        engine.observers.append(counts)
        timed.step()
        engine.observers.remove(counts)
        steps.append(sum(timed.step().values()))
        if len(steps) % EACH == 1:
            plain_steps.append(warm_step(plain)[0])
    began = now(engine)
    samples = [engine.collect(slot) for slot in range(engine.batch)]
    pipe.images(torch.stack([sample.codes for sample in samples]))
    pixels = (now(engine) - began) / engine.batch
    step, plain_step = trimmed(steps), trimmed(plain_steps)
    passes = sum(len(sample.accepted) for sample in samples) / engine.batch
    return {
        "outside": prefill + pixels,
        "plain": plain_step * (plain.prefill_steps + length - 1) + pixels,
        "codes_per_pass": length / passes,
        "step": step,
        "plain_step": plain_step,
        "nodes": engine.proposer.size - 1,
        "tried": counts.tried.tolist(),
        "kept": counts.kept.tolist(),
    }
