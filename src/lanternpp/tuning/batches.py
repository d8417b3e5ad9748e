"""Which tree to draft with at which batch size: measured once per machine, down to plain decoding.

Relative to a plain pass, a pass over drafted codes costs more the more samples share it, so the tree that is fastest for
one picture need not be the fastest for eight. How many codes a pass decides does not depend on the batch: that is counted once.
The cost of a step does: at every size each tree's steps are timed beside plain ones. Nothing is chosen that was not
measured to be faster than plain decoding at that size by `MARGIN`.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from lanternpp.engine.batching import ContinuousBatch
from lanternpp.engine.decode import Engine
from lanternpp.errors import InputError
from lanternpp.methods import BASELINE
from lanternpp.methods import method as named_method
from lanternpp.nn.checkpoints import digest
from lanternpp.pipeline import Pipeline, versions
from lanternpp.settings import Settings, dials_read, with_tree
from lanternpp.trees import build_tree, shape_name
from lanternpp.trees.shapes import SHAPES, chain
from lanternpp.trees.static import StaticTree
from lanternpp.tuned import tuned_path
from lanternpp.tuning.batch_runner import BatchRunner, Conditions, machine
from lanternpp.tuning.journal import Journal

CHAINS = (1, 2, 4, 6, 8)
MARGIN = 0.03  # what a tree must gain over plain decoding, and over the method's own tree
WARM, STEPS = 2, 12  # of every tree at every size
LEAST, LONG = 3, 30.0  # so many steps at least, even where they take longer than so many seconds
COUNTED = 8  # pictures whose passes are counted, of prompts spread over the list, as prompts differ
SEED = 3000
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Cell:
    """A tree at a batch size, measured."""

    rows: int  # samples at once
    tree: str | None  # None: the method has none
    codes: float  # that a pass decides of a sample, the prefill apart
    step: float  # seconds of a step
    plain: float  # seconds of a plain step
    speedup: float  # pictures per second over those of plain decoding at the same size


@dataclass(frozen=True)
class BatchChoice:
    """The measured trees by batch size; called with settings and a size, it returns the settings to draw with."""

    settings: Settings  # what was measured, its batch size apart
    cells: tuple[Cell, ...]

    def __call__(self, settings: Settings, rows: int) -> Settings:
        """The settings for a batch of `rows` samples that are to be drawn with `settings`.

        Returns `settings` unchanged if their method, parts or tree were not measured; other dials are assumed to make
        no difference. Where a size was not measured the next larger one decides, and plain decoding
        beyond the largest. Plain decoding follows the model exactly, even where the requested method is relaxed.
        """
        same = replace(settings, batch_size=rows)
        if not self.covers(settings):
            return same
        best = self.best(rows)
        if best is None:
            return plain_settings(same)
        return same if best.tree is None else with_tree(same, best.tree)

    def covers(self, settings: Settings) -> bool:
        """Whether settings are among those that were measured."""
        measured = self.settings
        names = ("method", "proposer", "accept", "tree", "window", "compile", "verify", "cut")
        alike = all(getattr(settings, name) == getattr(measured, name) for name in names)
        return alike and (settings.cfg == 1) == (measured.cfg == 1)

    def best(self, rows: int) -> Cell | None:
        """The fastest at a size; None: plain decoding."""
        size = min((cell.rows for cell in self.cells if cell.rows >= rows), default=None)
        field = {cell.tree: cell for cell in self.cells if cell.rows == size}
        if not field:
            return None
        best = max(field.values(), key=lambda cell: cell.speedup)
        method_tree = field.get(self.settings.tree)
        if method_tree and best.speedup < method_tree.speedup * (1 + MARGIN):
            best = method_tree
        return best if best.speedup >= 1 + MARGIN else None


def sizes(most: int) -> list[int]:
    """1, 2, 4 and so on, up to `most`, which is among them."""
    return [*(2**i for i in range(most.bit_length()) if 2**i < most), most]


def plain_settings(settings: Settings) -> Settings:
    """The same picture by plain decoding: `ar`'s parts, and none of the dials that those do not read."""
    row = {name: value for name, value in asdict(named_method(BASELINE)).items() if name != "about"}
    return replace(settings, method=BASELINE, **row)


def calibrate(
    pipe: Pipeline,
    settings: Settings,
    rows: Sequence[int],
    prompts: Conditions,
    progress: Progress | None = None,
    restart: bool = False,
) -> BatchChoice:
    """Measure a method at these batch sizes, or read what was measured here before; `prompts` are drawn.

    progress: called with (done, total) before every measurement. restart: measure again. What was measured lies beside the
    model's tunings, one line for each measurement, so that a stopped calibration can be resumed; with the same weights, settings,
    device, dtype, processor, threads and versions it holds. Where it cannot be written it is measured all the same, with a warning. Raises InputError
    where a part of the method is missing.
    """
    steps, last_done = calibration(pipe, settings, rows, prompts, restart), -1
    while True:
        try:
            done, total = next(steps)
        except StopIteration as end:
            found: BatchChoice = end.value
            return found
        if progress and done != last_done:
            progress(done, total)
        last_done = done


def calibration(
    pipe: Pipeline, settings: Settings, rows: Sequence[int], prompts: Conditions, restart: bool = False
) -> Steps:
    """`calibrate` as a generator, which yields at least once per step of an engine.

    Yields (done, total) before each step of a measurement. What was measured before is read, without a step.
    """
    settings = replace(settings, batch_size=1, measure=False)
    if settings.proposer == "nothing":
        return BatchChoice(settings, ())
    with ExitStack() as stack:
        journal = _journal(pipe, settings, prompts, restart, stack)
        return (yield from _Calibration(pipe, settings, prompts, journal).run(rows))


Steps = Generator[tuple[int, int], None, BatchChoice]


class _Calibration:
    """The measurements of one method."""

    def __init__(self, pipe: Pipeline, settings: Settings, prompts: Conditions, journal: Journal):
        self.pipe, self.settings, self.prompts, self.journal = pipe, settings, prompts, journal

    def run(self, rows: Sequence[int]) -> Steps:
        """Every tree at every size."""
        field = [(size, tree) for size in rows for tree in self.trees(size)]
        chains = {tree: depth for _, tree in field if (depth := _chain(tree))}
        longest = max(chains, key=chains.__getitem__, default=None)
        others = dict.fromkeys(tree for _, tree in field if tree not in chains)
        counted = [tree for tree in (longest, *others) if tree is not None or not chains]
        self.total = len(counted) + len(field)
        codes_by_tree = {}
        for i, tree in enumerate(counted):
            codes_by_tree[tree] = yield from self._once({"codes": tree}, partial(self._count, tree), i)
        cells: list[Cell] = []
        for size, tree in field:
            measure = partial(self._time, size, tree)
            took = yield from self._once({"rows": size, "tree": tree}, measure, len(counted) + len(cells))
            depth = chains.get(tree)
            seen = codes_by_tree[longest if depth else tree]
            codes = sum(min(n, depth + 1) if depth else n for n in seen) / len(seen)
            cells.append(self._cell(size, tree, codes, took))
        self.pipe.release()
        return BatchChoice(self.settings, tuple(cells))

    def _once(
        self, key: Mapping[str, Any], measure: Callable[[], Iterator[Any]], place: int
    ) -> Generator[tuple[int, int], None, Any]:
        """What was measured, or is now: the last value that measuring yields."""
        value = None
        if not self.journal.knows(key):
            yield place, self.total
            for value in measure():
                if value is None:
                    yield place, self.total
        return self.journal.once(key, lambda: value)

    def trees(self, rows: int) -> list[str | None]:
        """The method's own tree, the one that was tuned for this size, and chains."""
        method_tree = self.settings.tree
        if method_tree is None or "tree" not in dials_read(self.settings.proposer, self.settings.accept):
            return [method_tree]
        conditions = self.pipe.conditions(replace(self.settings, batch_size=rows))
        tuned = self.pipe.tuned.settings(self.settings.method, conditions) if self.pipe.tuned else {}
        others = [dial for dial in tuned if dial != "tree" and tuned[dial] != getattr(self.settings, dial)]
        found = [tuned["tree"]] if "tree" in tuned and not others else []
        chain_depths = {_chain(tree) for tree in (method_tree, *found)} - {None}
        return list(
            dict.fromkeys([method_tree, *found, *(chain_name(n) for n in CHAINS if n not in chain_depths)])
        )

    def _engine(self, settings: Settings, rows: int) -> Engine:
        return self.pipe.new_engine(replace(settings, batch_size=rows))

    def _count(self, tree: str | None) -> Iterator[list[int] | None]:
        """Codes decided by every pass that had room for its whole draft."""
        engine = self._engine(with_tree(self.settings, tree), COUNTED)
        count, length = len(self.prompts), engine.target.length
        conditions = [self.prompts[i * max(count, COUNTED) // COUNTED % count] for i in range(COUNTED)]
        found: list[int] = []
        for sample in ContinuousBatch(
            engine, zip(conditions, range(SEED, SEED + COUNTED), strict=True)
        ).run():
            if sample is None:
                yield None
                continue
            decided, *accepted = sample[1].accepted
            for kept in accepted:
                if decided + engine.proposer.depth + 1 <= length or not found:
                    found.append(kept)
                decided += kept
        yield found or [1]

    def _time(self, rows: int, tree: str | None) -> Iterator[dict[str, Any] | None]:
        """A tree's steps beside plain ones, each in the same moment as the other."""
        plain = BatchRunner(self._engine(plain_settings(self.settings), rows), self.prompts, SEED)
        tried = BatchRunner(self._engine(with_tree(self.settings, tree), rows), self.prompts, SEED)
        pairs: list[tuple[float, float]] = []
        while len(pairs) < WARM + STEPS and not (len(pairs) >= WARM + LEAST and sum(map(sum, pairs)) > LONG):
            for batch in (tried, plain):
                yield from batch.entering()
            one = tried.timed_step()
            yield None
            pairs.append((one, plain.timed_step()))
            yield None
        del pairs[:WARM]
        begun = {"begin": median(tried.begun), "plain_begin": median(plain.begun)}
        yield begun | {"steps": [one for one, _ in pairs], "plain": [other for _, other in pairs]}

    def _cell(self, rows: int, tree: str | None, codes: float, took: Mapping[str, Any]) -> Cell:
        """The cost of steps relative to the plain steps beside them, so that other load on the machine cancels out.

        A picture costs its prefill, during which the batch stands still, and its share of the steps. On average, half of
        the codes that its last draft decides beyond the first lie behind the end of the picture.
        """
        plain = median(took["plain"])
        ratio = median(one / other for one, other in zip(took["steps"], took["plain"], strict=True))
        left = self.pipe.target.length - 1
        passes = (left + (codes - 1) / 2) / codes
        seconds = took["begin"] + passes * ratio * plain / rows
        return Cell(
            rows, tree, codes, ratio * plain, plain, (took["plain_begin"] + left * plain / rows) / seconds
        )


def chain_name(depth: int) -> str:
    """A chain as `--tree` takes it."""
    name = f"chain-{depth}"
    return name if name in SHAPES else shape_name(chain(depth))


def _chain(tree: str | None) -> int | None:
    """How deep a tree is that is a chain; None: it is none."""
    built = None if tree is None else build_tree(tree)
    if isinstance(built, StaticTree) and built.shape == chain(built.depth):
        return built.depth
    return None


def _journal(
    pipe: Pipeline, settings: Settings, prompts: Conditions, restart: bool, stack: ExitStack
) -> Journal:
    """Where measurements go: beside the model's tunings, under a name that says what they hold for."""
    facts: dict[str, Any] = {"tuned": f"{settings.method}, by batch size", "model": pipe.name}
    facts |= {"weights": pipe.weights, "settings": asdict(settings), "prompts": list(prompts)}
    facts |= {"machine": machine(pipe), "versions": versions()}
    name = f"batches-{digest([f'{key} {value}' for key, value in sorted(facts.items())])}"
    folder = tuned_path(pipe.folder).parent / name
    for anew in (restart, True):  # a damaged one is made again
        try:
            return Journal(folder, facts, anew, optional=True)
        except (InputError, OSError, ValueError) as error:
            reason = error
    warnings.warn(f"measurements by batch size are not kept: {reason}", stacklevel=2)
    return Journal(Path(stack.enter_context(tempfile.TemporaryDirectory())), facts)
