"""How long a step takes on this machine, by its draft: measured for at most a second, or 5 % of a picture's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lanternpp.engine.decode import Engine
from lanternpp.engine.stopwatch import PHASES, TimedEngine

# The budget of a measurement: seconds, or a share of a picture by plain decoding where that is more.
SECONDS, SHARE = 0.8, 0.05
# Timed steps of a draft: FEWEST, one less where a step takes SLOW seconds, and up to MOST until they have taken LONG seconds.
FEWEST, MOST, LONG, SLOW = 3, 7, 0.025, 0.1
NOISY = 1.15  # mean of the medians over minima from which on other work has disturbed a measurement; 1.06 on a quiet machine


@dataclass(frozen=True)
class Step:
    """A measured step with one draft. Seconds are medians."""

    draft: str  # a tree, "window-8", or "plain"
    rows: int  # of the target's pass
    seconds: float
    target: float  # seconds of the target's pass in it
    spread: float  # median over minimum


def measure(drafts: Iterable[tuple[str, Callable[[], Engine]]], length: int) -> tuple[Step, ...]:
    """Time the steps of some drafts, each in an engine of its own that is freed after it, until the budget is spent.

    drafts: their names and what makes the engine; the first two, of which one is plain decoding, are always measured, the others
    as far as the budget allows. length: codes of a picture.
    """
    steps: list[Step] = []
    began, budget = time.perf_counter(), SECONDS
    for name, make in drafts:
        spent = time.perf_counter() - began
        if len(steps) >= 2 and spent + spent / len(steps) > budget:
            break
        steps.append(_timed(name, make()))
        budget = max(budget, SHARE * length * steps[0].seconds)
    return tuple(steps)


def _timed(name: str, engine: Engine) -> Step:
    """Steps in the middle of a picture, without its prompt: what a step takes does not depend on the codes."""
    timed = TimedEngine(engine)
    timed.move_midway(first=True)
    timed.step()  # what is built on first use is not timed
    fewest = FEWEST - (sum(timed.spans.pop().values()) > SLOW)
    began = time.perf_counter()
    while len(timed.spans) < fewest or (len(timed.spans) < MOST and time.perf_counter() - began < LONG):
        timed.move_midway()
        timed.step()
    seconds = [sum(span[phase] for phase in PHASES) for span in timed.spans]
    rows = engine.guidance.branches * engine.batch * engine.proposer.size
    typical = median(seconds)
    return Step(name, rows, typical, median(span["pass"] for span in timed.spans), typical / min(seconds))


def disturbed(steps: Sequence[Step]) -> bool:
    """Whether other work took the cores while the steps were measured."""
    return fmean(step.spread for step in steps) > NOISY


def bound(steps: Sequence[Step]) -> str | None:
    """One sentence on what bounds passes on this machine; None where too little was measured to tell."""
    by_rows = sorted(steps, key=lambda step: step.rows)
    if len({step.rows for step in by_rows}) < 3:
        return None
    least, most = by_rows[0], by_rows[-1]
    cheap = [step.rows for step in by_rows if step.target <= 2 * least.target]
    if max(cheap) == least.rows:
        return f"arithmetic bounds this machine: any draft more than doubles the time of a pass over {least.rows} rows"
    if max(cheap) == most.rows:
        return f"memory bounds this machine: a pass over {most.rows} rows takes at most twice as long as one over {least.rows}"
    return f"memory bounds passes over up to {max(cheap)} rows on this machine, arithmetic larger ones"
