"""What a step takes beside its floor: the time that its linear layers and its attention take alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from lanternpp.engine.stopwatch import PHASES, TimedEngine, elapsed
from lanternpp.evaluation.recorded import ATTENTION, LINEARS, OTHERS, RecordedStep, Replay
from lanternpp.evaluation.report import markdown_table
from lanternpp.evaluation.speed import Entry
from lanternpp.nn.native import product_dtype
from lanternpp.pipeline import Pipeline
from lanternpp.settings import Settings

WARM = 2  # steps before the first that counts
REPEATS = 5  # of what the limits are measured with, after the first
BUFFER = 1 << 26  # numbers of 4 bytes, more than caches hold
SIDES = {"cpu": 1024, "cuda": 8192}  # of the matrices that are multiplied
PARTS = (LINEARS, ATTENTION, OTHERS, "draft", "rest")
HEADINGS = {
    "method": "method",
    "batch_size": "batch",
    "rows": "rows",
    "step": "step, ms",
    LINEARS: "linear layers",
    ATTENTION: "attention",
    OTHERS: "other operations",
    "draft": "drafter",
    "rest": "rest",
    "ratio": "step / floor",
    "bytes": "MB",
    "flops": "GFLOP",
    "read": "MB at bandwidth, ms",
    "compute": "GFLOP at rate, ms",
}
SCALES = {"bytes": 1e-6, "flops": 1e-9, "ratio": 1}  # of the figures that are no seconds


@dataclass(frozen=True)
class Limits:
    """What this device can do: bytes per second that memory gives, flops per second of a large product."""

    bandwidth: float
    rate: float


@dataclass(frozen=True)
class StepFloor:
    """A step in the middle of a picture. Seconds are medians, and PARTS add up to the step."""

    method: str
    batch_size: int
    rows: int  # of a pass of the target: guidance branches x pictures x nodes
    step: float
    linears: float  # alone, those of the target's decoder
    attention: float  # alone
    others: float  # the decoder's other operations, alone
    draft: float  # the drafter's part of the step
    bytes: int  # of all matrix products of the step
    flops: int

    @property
    def rest(self) -> float:
        """Head, guidance, sampling, verification and Python: what is left of the step."""
        return self.step - self.linears - self.attention - self.others - self.draft

    @property
    def floor(self) -> float:
        """Linear layers and attention, each alone."""
        return self.linears + self.attention

    @property
    def ratio(self) -> float:
        """The step over its floor."""
        return self.step / self.floor


class _Case:
    """An engine in the middle of its pictures, with the parts of its step."""

    def __init__(self, pipe: Pipeline, label: str, settings: Settings, conditions: Sequence[str | None]):
        self.label, self.batch = label, settings.batch_size
        self.middle = pipe.target.length // 2
        given = [conditions[i % len(conditions)] for i in range(self.batch)]
        self.timed = self._admitted(pipe, settings, given)
        eager = replace(settings, compile=False)
        recorded = self.timed if eager == settings else self._admitted(pipe, eager, given)
        self._to_middle(recorded)
        self.recorded = RecordedStep(recorded.engine)
        device = recorded.engine.codes.device
        self.replays = {part: Replay(calls, device) for part, calls in self.recorded.calls.items()}
        self.seconds: dict[str, list[float]] = {part: [] for part in self.replays}

    def run(self) -> None:
        """A step, then each of its parts alone."""
        self._to_middle(self.timed)
        self.timed.step()
        for part, replay in self.replays.items():
            self.seconds[part].append(replay.seconds())

    def row(self) -> StepFloor:
        """The medians of what ran after the first `WARM` times."""
        spans = self.timed.spans[WARM:]
        alone = {part: median(seconds[WARM:]) for part, seconds in self.seconds.items()}
        return StepFloor(
            self.label,
            self.batch,
            self.recorded.rows,
            median(sum(span[phase] for phase in PHASES) for span in spans),
            **alone,
            draft=median(span["draft"] for span in spans),
            bytes=self.recorded.bytes,
            flops=self.recorded.flops,
        )

    def _admitted(self, pipe: Pipeline, settings: Settings, conditions: Sequence[str | None]) -> TimedEngine:
        timed = TimedEngine(pipe.new_engine(settings))
        timed.admit(conditions, range(self.batch))
        return timed

    def _to_middle(self, timed: TimedEngine) -> None:
        """Back to the middle of the pictures, with other random numbers than last time."""
        timed.engine.passes.fill_(1)
        timed.engine.noise.seed.add_(1)
        timed.move_to(torch.full_like(timed.engine.count, self.middle))


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """The limits of a device, each the best of a few runs: a sum and a copy of a large tensor, a product in this dtype,
    or in float32 where the kernels in C multiply bfloat16 as floats.
    """
    large = torch.ones(BUFFER, device=device)
    other = torch.empty_like(large)
    side = SIDES[device.type]
    a, b = torch.ones(2, side, side, dtype=product_dtype(large.to(dtype)), device=device)
    runs: list[tuple[Callable[[], object], int]] = [
        (large.sum, large.nbytes),
        (lambda: other.copy_(large), 2 * large.nbytes),
        (lambda: a @ b, 2 * side**3),
    ]
    total, copied, product = (
        amount / min(elapsed(run, device) for _ in range(1 + REPEATS)) for run, amount in runs
    )
    return Limits(max(total, copied), product)


def measure_floors(
    pipe: Pipeline,
    field: Sequence[Entry],
    batch_sizes: Sequence[int],
    conditions: Sequence[str | None],
    overrides: Mapping[str, Any],
    steps: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[StepFloor]:
    """A row for every method at every batch size; at one size they take turns, `steps` times. InputError.

    overrides: of all methods' settings, as `Pipeline.settings` takes them.
    """
    settings = {
        (size, entry.label): pipe.settings(
            entry.method, **{**overrides, **entry.overrides, "batch_size": size}
        )
        for size in batch_sizes
        for entry in field
    }
    rows, done = [], 0
    for size in batch_sizes:
        cases = [_Case(pipe, entry.label, settings[size, entry.label], conditions) for entry in field]
        for _ in range(WARM + steps):
            if progress:
                progress(done, len(batch_sizes) * (WARM + steps))
            done += 1
            for case in cases:
                case.run()
        rows += [case.row() for case in cases]
        cases.clear()  # their caches, before those of the next size
    return rows


def figures(rows: Sequence[StepFloor], limits: Limits) -> list[dict[str, Any]]:
    """All figures of every row: with `rest`, `floor`, `ratio`, and the seconds of its bytes and its arithmetic at the limits."""
    return [
        asdict(row)
        | {"rest": row.rest, "floor": row.floor, "ratio": row.ratio}
        | {"read": row.bytes / limits.bandwidth, "compute": row.flops / limits.rate}
        for row in rows
    ]


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of `figures` as texts, in the order of HEADINGS: seconds in milliseconds."""
    numbers = [
        row[name] * SCALES.get(name, 1e3) for name in HEADINGS if name not in ("method", "batch_size", "rows")
    ]
    return [row["method"], str(row["batch_size"]), str(row["rows"]), *(f"{number:.3g}" for number in numbers)]


def markdown(table: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    """`figures` as a table, with what they hold for under it."""
    rows = [cells(row) for row in table]
    return f"{markdown_table(list(HEADINGS.values()), rows)}\n{settings_line(about)}\n"


def settings_line(about: Mapping[str, Any]) -> str:
    """What the figures hold for, and the limits; about: the content of floor.json."""
    machine, limits = about["machine"], about["limits"]
    return (
        f"{about['model']}, medians of {about['steps']} steps in the middle of a picture, methods taking turns; parts in ms. "
        f"Here memory gives {limits['bandwidth'] / 1e9:.3g} GB/s and a product of large matrices {limits['rate'] / 1e9:.4g} "
        f"GFLOP/s. {machine['dtype']}, {machine['device']}, {machine['processor']}, {machine['threads']} threads, "
        f"torch {about['versions']['torch']}."
    )
