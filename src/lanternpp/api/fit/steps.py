"""How long a step takes on this machine, by its draft: measured for at most a second, or 5 % of a picture's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Annotated

from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import TimedEngine
from lanternpp.util.jsonfile import Between

# The budget of a measurement: seconds, or a share of a picture by plain decoding where that is more.
SECONDS, SHARE = 0.8, 0.05
# Timed steps of a draft: FEWEST, one less where a step takes SLOW seconds, and up to MOST until they have taken LONG seconds.
FEWEST, MOST, LONG, SLOW = 3, 7, 0.04, 0.1
NOISY = 1.15  # mean of the medians over minima from which on other work has disturbed a measurement; 1.06 on a quiet machine


@dataclass(frozen=True)
class Step:
    """A measured step with one draft. Seconds are medians."""

    draft: str  # a tree, "window-8", or "plain"
    rows: Annotated[int, Between(1, 1 << 32)]  # of the target's pass
    seconds: Annotated[float, Between(1e-9, 1e9)]
    target: float  # seconds of the target's pass in it
    spread: float  # median over minimum


Span = tuple[float, float]  # seconds of a step, and of the target's pass in it


def warm_step(timed: TimedEngine) -> Span:
    """A step that follows one of the same engine, as in drawing: the caches hold what it reads. A slow step is taken as it is."""
    span = timed.midway_step()
    return span if span[0] > SLOW else timed.midway_step()


def measure(drafts: Iterable[tuple[str, Callable[[], Engine]]], length: int) -> tuple[Step, ...]:
    """Time the steps of some drafts until the budget is used up, each in an engine of its own that is freed after it.

    drafts: their names, and functions that make the engine. The first is plain decoding, which is timed after every timed step of
    another draft: a step's time relative to plain decoding's does not change when the machine becomes slower for a while. The second
    is always measured too, the others as far as the budget allows. length: codes of a picture.
    """
    (plain_name, make_plain), *others = drafts
    began, plain = time.perf_counter(), TimedEngine(make_plain())
    plain.midway_step(first=True)  # with the set-up of a first use
    beside = [warm_step(plain) for _ in range(FEWEST)]
    budget = max(SECONDS, SHARE * length * beside[-1][0])
    measured: list[tuple[str, int, list[tuple[Span, Span]]]] = []
    for name, make in others:
        used = time.perf_counter() - began
        if measured and used + used / (1 + len(measured)) > budget:
            break
        drafted = TimedEngine(make())
        fewest = FEWEST - (drafted.midway_step(first=True)[0] > SLOW)
        pairs, since = list[tuple[Span, Span]](), time.perf_counter()
        while len(pairs) < fewest or (len(pairs) < MOST and time.perf_counter() - since < LONG):
            pairs.append((warm_step(drafted), warm_step(plain)))
        measured.append((name, drafted.rows, pairs))
        beside += [other for _, other in pairs]
    usual = median(seconds for seconds, _ in beside)
    steps = []
    for name, rows, pairs in ((plain_name, plain.rows, [(span, span) for span in beside]), *measured):
        seconds, target = (usual * median(span[i] / other[0] for span, other in pairs) for i in (0, 1))
        taken = [span[0] for span, _ in pairs]
        steps.append(Step(name, rows, seconds, target, median(taken) / min(taken)))
    return tuple(steps)


def disturbed(steps: Sequence[Step]) -> bool:
    """Whether other work took the cores while the steps were measured."""
    return fmean(step.spread for step in steps) > NOISY


def bound(steps: Sequence[Step]) -> str | None:
    """One sentence on what bounds passes on this machine; None where too little was measured to tell."""
    rows = sorted({step.rows for step in steps})
    if len(rows) < 3:
        return None
    fastest = min(step.target for step in steps if step.rows == rows[0])
    cheap = max(step.rows for step in steps if step.target <= 2 * fastest)
    if cheap == rows[0]:
        return f"arithmetic bounds this machine: any draft more than doubles the time of a pass over {cheap} rows"
    if cheap == rows[-1]:
        return f"memory bounds this machine: a pass over {cheap} rows takes at most twice as long as one over {rows[0]}"
    return f"memory bounds passes over up to {cheap} rows on this machine, arithmetic larger ones"
