"""The search space of a tuning, from the parameters of a trial to overrides, and the drawing and timing of one candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.api.fit import warm_step
from lanternpp.api.options import Settings
from lanternpp.api.pipeline import Pipeline
from lanternpp.api.settings import dial_limits, dials_read, part
from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import AcceptanceByRank, TimedEngine, synchronized_time, trimmed_mean
from lanternpp.engine.verify import BLOCK
from lanternpp.errors import InputError
from lanternpp.trees import shape_name, static_shape
from lanternpp.trees.search import best_tree, expected_codes
from lanternpp.trees.static import Shape, chain, is_chain
from lanternpp.tuning.options import TuningOptions

if TYPE_CHECKING:
    from optuna.trial import Trial

CHAIN, SEARCHED = "chain", "searched"  # values of the parameter `shape` besides the names of trees
HAND_MADE = ("deep-8", "eagle-25", "lantern-57")
WINDOWS: dict[str, tuple[Any, ...]] = {  # dials of a window: their least and greatest number, or names
    "window": (1, 32),
    "alternatives": (0, 6),
    "init": ("mixed", "above", "last", "uniform"),
    "window_rows": (1, 2),
}
NEIGHBOURS = (5, 10, 100, 1000)
MAX_SURVIVAL = 0.7
MAX_RANKS = 16  # children of a node that the search for a tree considers
STEPS_PER_PLAIN_STEP = 5  # timed steps of a candidate for one timed step of plain decoding
PRIOR_COUNT = 20.0  # verified children of a depth that weigh as much as the acceptance over all depths

Observations = Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
"""The overrides of drafts, and the rows that `draw` returned for batches of them."""


class Space:
    """The candidates for one method: trees or windows within the limits of the options, and the strength of its rule under a budget.

    fixed: overrides of the user, which no candidate changes. engine: an engine of the method. Raises InputError if there is no candidate.
    """

    def __init__(
        self,
        pipe: Pipeline,
        settings: Settings,
        fixed: Mapping[str, Any],
        engine: Engine,
        options: TuningOptions,
    ):
        self.pipe, self.settings, self.fixed = pipe, settings, fixed
        self.nodes, self.depth = options.nodes, options.depth
        self.max_window = min(self.depth, pipe.target.length // 2)
        has_confidence = getattr(getattr(engine.proposer, "drafter", None), "confidence", None) is not None
        self.ends_early = has_confidence and not settings.compile and fixed.get("min_survival") is None
        dials = dials_read(settings.proposer, settings.accept)
        self.strength_range: Any = part("accept", settings.accept).strength if options.limited else None
        self.strengths = tuple(first_strengths(settings, fixed)) if self.strength_range else ()
        branches = ("alternatives",) if fixed.get("verify") == BLOCK else ()
        self.window_dials = [name for name in WINDOWS if name in dials and name not in branches]
        if has_window(settings):
            smallest = {name: WINDOWS[name][0] for name in self.window_dials}
            smallest |= {name: fixed[name] for name in WINDOWS if fixed.get(name) is not None}
            if window_nodes(smallest) > self.nodes:
                values = ", ".join(f"{name} {value}" for name, value in smallest.items())
                raise InputError(f"--nodes {self.nodes} are fewer than those of {values}; allow more")
        self.shapes = [CHAIN]  # values of the parameter `shape`
        if not fixed.get("min_survival") and fixed.get("verify") != BLOCK:
            shapes = {name: static_shape(name) or () for name in (settings.tree, *HAND_MADE) if name}
            trees = [name for name, shape in shapes.items() if not is_chain(shape) and self.fits(shape)]
            self.shapes += [SEARCHED, *trees]

    def fits(self, shape: Shape) -> bool:
        """Return whether a shape lies within the limits."""
        depth, ranks = max(map(len, shape)), 1 + max(map(max, shape))
        return len(shape) <= self.nodes and depth <= self.depth and ranks <= self.pipe.target.vocab

    def initial_params(self) -> list[dict[str, Any]]:
        """Return the parameters of the first trials: the method's own draft, the hand-made trees, and chains."""
        if has_window(self.settings):
            dials = {name: x for name in self.window_dials if (x := getattr(self.settings, name)) is not None}
            windows = (dials.get("window", 16), 2, 4, 8, 16, 32)
            drafts = [dials | {"window": min(size, self.max_window)} for size in windows]
        else:
            survival = {"min_survival": 0.0} if self.ends_early else {}
            lengths = [n for n in (1, 2, 4, 6, 9, 13) if n <= min(self.depth, self.nodes)]
            drafts = [{"shape": CHAIN, "chain": n, **survival} for n in lengths]
            drafts += [{"shape": shape} for shape in self.shapes[2:]]
            sizes = [n for n in (4, 8, 16, 32, 64) if n <= self.nodes and SEARCHED in self.shapes]
            drafts += [{"shape": SEARCHED, "nodes": n, "levels": self.depth} for n in sizes]
        values = {name: getattr(self.settings, name) for name in self.strengths}
        strengths = {name: x for name, x in values.items() if x not in (None, self.strength_range[1])}
        return [draft | strengths for draft in drafts]

    def expected_codes(self, overrides: Mapping[str, Any], observations: Observations) -> float | None:
        """Return the codes per pass of a draft on a tree, from all drafts of its kind; None for windows and chains that end early.

        Acceptance of a child depends on its depth and rank and not on the tree around it, so the pictures of all drafts together
        predict the codes of a draft better than its own few pictures.
        """
        shape = static_shape(overrides["tree"]) if "tree" in overrides else None
        if not shape or overrides.get("min_survival"):
            return None
        kind = self._kind(overrides)
        rows = [row for tried, row in observations if self._kind(tried) == kind]
        return expected_codes(acceptance_table(rows, max(map(len, shape)), 1 + max(map(max, shape))), shape)

    def _kind(self, overrides: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what acceptance depends on besides depth and rank: the rule's strength, and if a draft is a chain and ends early."""
        chain_like = is_chain(static_shape(overrides["tree"]) or ())
        strengths = (overrides.get(name) for name in self.strengths)
        return (chain_like, bool(overrides.get("min_survival")), *strengths)

    def overrides(self, trial: Trial, observations: Observations) -> dict[str, Any] | None:
        """Return the overrides of a trial, or None if these are outside the limits. observations: of earlier trials."""
        overrides: dict[str, Any] = {}
        for name in self.strengths:
            if name == "neighbours":
                values = {k for k in NEIGHBOURS if k < self.pipe.target.vocab} | {self.settings.neighbours}
                overrides[name] = trial.suggest_categorical(name, sorted(values))
            else:
                _, exact, strongest = self.strength_range
                overrides[name] = trial.suggest_float(name, *sorted((exact, min(strongest, 10.0))))
        if has_window(self.settings):
            return self._window(trial, overrides)
        kind = trial.suggest_categorical("shape", self.shapes)
        if kind == CHAIN:
            shape = chain(trial.suggest_int("chain", 1, min(self.depth, self.nodes)))
            if self.ends_early:
                overrides["min_survival"] = trial.suggest_float("min_survival", 0.0, MAX_SURVIVAL, step=0.05)
        elif kind == SEARCHED:
            nodes = trial.suggest_int("nodes", 1, self.nodes, log=True)
            levels = trial.suggest_int("levels", 1, self.depth)
            rows = [row for _, row in observations]
            table = acceptance_table(rows, self.depth, min(MAX_RANKS, self.pipe.target.vocab))
            shape = best_tree(table, nodes, levels)
        else:
            return overrides | {"tree": kind}
        return overrides | {"tree": shape_name(shape)}

    def _window(self, trial: Trial, overrides: dict[str, Any]) -> dict[str, Any] | None:
        limits = dial_limits(self.pipe.target) | {"window": self.max_window}
        for name in self.window_dials:
            low = WINDOWS[name][0]
            if self.fixed.get(name) is not None:
                overrides[name] = self.fixed[name]
            elif isinstance(low, str):
                overrides[name] = trial.suggest_categorical(name, WINDOWS[name])
            else:
                high = max(low, min(WINDOWS[name][1], limits[name]))
                overrides[name] = trial.suggest_int(name, low, high)
        return overrides if window_nodes(overrides) <= self.nodes else None


def acceptance_table(rows: Sequence[Mapping[str, Any]], depth: int, ranks: int) -> Tensor:
    """Return acceptance [depth, ranks] from rows of `draw`; where few children were verified, that of their rank at all depths."""
    total = torch.zeros(2, depth, ranks, dtype=torch.float64)
    for row in rows:
        table = torch.tensor([row["tried"], row["kept"]], dtype=torch.float64)
        # A negative width removes the depths and ranks beyond the table.
        total += F.pad(table, (0, ranks - table.shape[2], 0, depth - table.shape[1]))
    verified, accepted = total
    prior = 0.5 / torch.arange(1, ranks + 1, dtype=torch.float64)  # [ranks]
    by_rank = (accepted.sum(0) + prior) / (verified.sum(0) + 1)  # [ranks]
    return ((accepted + PRIOR_COUNT * by_rank) / (verified + PRIOR_COUNT)).clamp(1e-4, 1 - 1e-4)


def has_window(settings: Settings) -> bool:
    """Return whether a method drafts in a window instead of a tree."""
    return {"window", "tree"} & dials_read(settings.proposer, settings.accept) == {"window"}


def window_nodes(dials: Mapping[str, Any]) -> int:
    """Return the draft codes of a pass."""
    return dials["window"] * dials.get("window_rows", 1) + dials.get("alternatives", 0)


def check(settings: Settings, limited: bool) -> None:
    """Raise InputError unless a method drafts on a static tree or in a window; limited: and its rule has a strength."""
    if limited and part("accept", settings.accept).strength is None:
        raise InputError(f"a budget picks a rule's strength, and {settings.accept!r} has none; use lantern++")
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


def first_strengths(settings: Settings, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dials of a rule that a budget searches, with the settings' values, or exact ones where the settings have none."""
    name, exact, _ = part("accept", settings.accept).strength
    values, dials = {"neighbours": NEIGHBOURS[0], name: exact}, dials_read(settings.proposer, settings.accept)
    values |= {name: value for name, value in vars(settings).items() if name in values and value is not None}
    return {name: x for name, x in values.items() if name in dials and fixed.get(name) is None}


class PlainEngine(TimedEngine):
    """An engine of plain decoding that is timed beside a candidate, one step for every `STEPS_PER_PLAIN_STEP` of the candidate.

    Both are then timed under the same load and heat of the machine, which matter little to the ratio of their times.
    """

    def __init__(self, pipe: Pipeline, settings: Settings, prompt: str | None):
        super().__init__(pipe.new_engine(settings))
        prefill = self.admit([prompt] * settings.batch_size, range(settings.batch_size))
        self.midway_step(zero_cache=True)
        self.prefill_steps = prefill / self.midway_step()[0]


def draw(
    pipe: Pipeline, settings: Settings, plain: PlainEngine, prompt: str | None, seeds: Sequence[int]
) -> dict[str, Any]:
    """Draw a batch in an engine of its own, timing every other step; return a row of figures for the log of a tuning.

    step, plain_step: seconds. outside: seconds of a picture's prefill and pixels. plain: seconds of a picture by plain decoding, with
    its prefill and pixels. tried, kept: children verified and accepted, [depth, rank].
    """
    engine, length = pipe.new_engine(settings), pipe.target.length
    timed, counts = TimedEngine(engine), AcceptanceByRank(length)
    prefill = timed.admit([prompt] * engine.batch, seeds)
    steps, plain_steps = list[float](), list[float]()
    while min(engine.decided()) < length:
        # One step is counted and the next step is timed, as the kernels compute a step in one call only without an observer.
        engine.observers.append(counts)
        timed.step()
        engine.observers.remove(counts)
        steps.append(sum(timed.step().values()))
        if len(steps) % STEPS_PER_PLAIN_STEP == 1:
            plain_steps.append(warm_step(plain)[0])
    start = synchronized_time(engine)
    samples = [engine.collect(slot) for slot in range(engine.batch)]
    pipe.images(torch.stack([sample.codes for sample in samples]))
    pixels = (synchronized_time(engine) - start) / engine.batch
    plain_step = trimmed_mean(plain_steps)
    passes = sum(len(sample.accepted) for sample in samples) / engine.batch
    return {
        "outside": prefill + pixels,
        "plain": plain_step * (plain.prefill_steps + length - 1) + pixels,
        "codes_per_pass": length / passes,
        "step": trimmed_mean(steps),
        "plain_step": plain_step,
        "nodes": engine.proposer.size - 1,
        "tried": counts.tried.tolist(),
        "kept": counts.kept.tolist(),
    }
