"""The methods of a race under torch.profiler, and their target passes beside the machine's bandwidth and arithmetic."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from lanternpp.api.pipeline import Pipeline
from lanternpp.engine.batching import opened
from lanternpp.engine.decode import Engine, Observer, Phase
from lanternpp.engine.threads import AdaptiveThreads
from lanternpp.evaluation.race import Race
from lanternpp.evaluation.report import HEADINGS, cell
from lanternpp.util.files import replacing, write_text
from lanternpp.util.terminal import Progress

STEPS = 32  # the first ones of a picture; a whole one may have a million operations
ROWS = 30  # of a table of operations
TOP = 4  # operations that are named beside a method
COLUMNS = (
    HEADINGS["method"],
    HEADINGS["where"],
    "target pass, ms",
    "of memory bandwidth, %",
    "of arithmetic, %",
    "most self time, %",
)
# bytes that a measurement of the bandwidth copies, side of the matrices of one of the arithmetic, and repeats of both
COPIED, SIDE, REPEATS = 1 << 28, 2048, 5


class PhaseMarks(Observer):
    """Marks the phases of an engine's steps in a profile."""

    def __init__(self) -> None:
        self.open = ExitStack()  # the mark of the phase that has begun

    def entered(self, phase: Phase) -> None:
        """End the mark of the phase before, and begin one."""
        self.open.close()
        self.open.enter_context(record_function("rest" if phase == "observe" else phase))


def machine_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per second of a large copy, read and written, and operations per second of a large matrix product."""
    from torch.utils.benchmark import Timer  # its import looks for a compiler of CUDA, and warns

    def seconds(work: Callable[[], object]) -> float:
        timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
        return min(timer.timeit(1).median for _ in range(REPEATS))

    source, matrix = (
        torch.ones(n, dtype=kind, device=device) for n, kind in ((COPIED, torch.uint8), (SIDE * SIDE, dtype))
    )
    goal, square = torch.empty_like(source), matrix.view(SIDE, SIDE)
    copied = seconds(lambda: goal.copy_(source))
    return 2 * COPIED / copied, 2 * SIDE**3 / seconds(lambda: square @ square)


def pass_costs(pipe: Pipeline, engine: Engine) -> tuple[float, float]:
    """Bytes that a target pass must read, in the middle of a picture, and its operations: weights, and keys and values.

    Embeddings and writes are not counted.
    """
    target, shape = pipe.target, pipe.target.decoder.stack()
    element = torch.empty(0, dtype=engine.cache.kv.dtype).element_size()
    heads = shape.heads + 2 * shape.kv_heads
    layer = shape.dim * (heads * shape.head_dim + shape.heads * shape.head_dim + 3 * shape.hidden)
    head = target.vocab * shape.dim
    sequences = engine.guidance.branches * engine.batch
    rows, context = sequences * engine.proposer.size, target.slots + target.length / 2
    weights = len(shape.layers) * layer
    keys = 2 * len(shape.layers) * shape.kv_heads * shape.head_dim * context * sequences
    scores = 4 * len(shape.layers) * shape.heads * shape.head_dim * context
    weight_size = 1 if pipe.dtype.startswith("int8") else element
    return (weights + head) * weight_size + keys * element, rows * (2 * (weights + head) + scores)


def profile_race(
    race: Race,
    table: Sequence[Mapping[str, Any]],
    folder: Path,
    progress: Progress | None = None,
) -> list[list[str]]:
    """Write profile-METHOD.txt and profile-METHOD.json for every method; returns rows of COLUMNS.

    table: the rows of `report.rows`. Their phases were timed without the profiler, which slows small operations down.
    """
    cuda, made = race.pipe.device.type == "cuda", []
    key = f"self_{'device' if cuda else 'cpu'}_time_total"
    bandwidth, arithmetic = machine_rates(race.pipe.device, next(race.pipe.target.parameters()).dtype)
    for i, (entry, row) in enumerate(zip(race.field, table, strict=True)):
        if progress:
            progress(i, len(race.field))
        engine = race.engines[entry.label]
        # Parts that are built on first use are not profiled.
        race.draw(entry, 0, race.seed)
        seeds = range(race.seed, race.seed + race.batch)
        found = profile_steps(engine, [race.prompts[0]] * race.batch, seeds)
        operations, name = found.key_averages(), f"profile-{entry.slug}"
        write_text(folder / f"{name}.txt", operations.table(key, ROWS, max_name_column_width=60))
        with replacing(folder / f"{name}.json") as temporary:
            found.export_chrome_trace(str(temporary))
        # On a GPU the time of a kernel is also that of the operation that started it, and of the phase around it.
        counted = [
            each
            for each in operations
            if not cuda or (each.device_type == DeviceType.CPU and not each.is_user_annotation)
        ]
        total = sum(getattr(each, key) for each in counted)
        counted = sorted(counted, key=lambda each: -getattr(each, key))[:TOP]
        shares = [f"{each.key} {100 * getattr(each, key) / total:.0f}" for each in counted]
        seconds = row["phases"]["pass"] * row["seconds"] / row["steps"]
        size, operations_of_pass = pass_costs(race.pipe, engine)
        reached = size / seconds / bandwidth, operations_of_pass / seconds / arithmetic
        figures = [f"{1000 * seconds:.3g}", *(f"{100 * share:.0f}" for share in reached)]
        made.append([row["method"], cell(row, "where"), *figures, ", ".join(shares)])
    return made


def profile_steps(engine: Engine, conditions: Sequence[str | None], seeds: Sequence[int]) -> profile:
    """The first steps of a batch of pictures under torch.profiler, after their prompts."""
    # or the profiler writes to stderr when it starts and ends
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    cuda = [ProfilerActivity.CUDA] if engine.codes.device.type == "cuda" else []
    marks = PhaseMarks()
    with opened(engine, conditions, seeds) as batch, AdaptiveThreads(engine.target.decoder) as threads:
        run = batch.run()
        list(islice(run, engine.batch))
        engine.observers.append(marks)
        try:
            with profile(activities=[ProfilerActivity.CPU, *cuda]) as found, marks.open:
                for _ in islice(run, STEPS):
                    threads.update()
        finally:
            engine.observers.remove(marks)
    return found
