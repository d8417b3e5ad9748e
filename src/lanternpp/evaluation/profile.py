"""The methods of a race under torch.profiler, and their target passes beside the machine's bandwidth and arithmetic."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from lanternpp.api.pipeline import Pipeline
from lanternpp.engine.batching import open_batch
from lanternpp.engine.compiled import GraphedParts
from lanternpp.engine.decode import Engine, Observer, Phase
from lanternpp.engine.threads import AdaptiveThreads
from lanternpp.evaluation.race import Race
from lanternpp.evaluation.report import COLUMNS as RACE_COLUMNS
from lanternpp.evaluation.report import cell
from lanternpp.nn.backend import BYTES_PER_WEIGHT, backend
from lanternpp.util.files import replacing, write_text
from lanternpp.util.terminal import track

STEPS = 32  # profiled at the start of a picture; a whole picture may have a million operations
ROWS = 30  # of a table of operations
TOP = 4  # operations with the most self time, listed in a method's row
COLUMNS = (
    RACE_COLUMNS["method"][0],
    RACE_COLUMNS["where"][0],
    "target pass, ms",
    "of memory bandwidth, %",
    "of arithmetic, %",
    "most self time, %",
)
COPY_BYTES = 1 << 28  # copied to measure the bandwidth
MATRIX_SIDE = 2048  # of the square matrices multiplied to measure the arithmetic
REPEATS = 5  # of both measurements


class PhaseMarks(Observer):
    """Marks of the phases of an engine's steps in a profile."""

    def __init__(self) -> None:
        self.current = ExitStack()  # the mark of the phase that has begun

    def entered(self, phase: Phase) -> None:
        """End the mark of the previous phase, and begin the mark of this one."""
        self.current.close()
        self.current.enter_context(record_function("rest" if phase == "observe" else phase))


def machine_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Measure the bytes per second of a large copy, read and written, and the operations per second of a large matrix product."""
    from torch.utils.benchmark import Timer  # its import looks for a compiler of CUDA, and warns

    def seconds(work: Callable[[], object]) -> float:
        timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
        with torch.accelerator.device_index(device.index):  # that the timer waits for
            return min(timer.timeit(1).median for _ in range(REPEATS))

    source, copy = torch.ones(2, COPY_BYTES, dtype=torch.uint8, device=device)
    matrix = torch.ones(MATRIX_SIDE, MATRIX_SIDE, dtype=dtype, device=device)
    bandwidth = 2 * COPY_BYTES / seconds(lambda: copy.copy_(source))
    return bandwidth, 2 * MATRIX_SIDE**3 / seconds(lambda: matrix @ matrix)


def pass_costs(pipe: Pipeline, engine: Engine) -> tuple[float, float]:
    """Return the bytes that a target pass must read in the middle of a picture, and its operations, without embeddings and writes."""
    target, config = pipe.target, pipe.target.decoder.config
    # Of queries, keys, values and outputs.
    head_channels = (2 * config.heads + 2 * config.num_kv_heads) * config.head_dim
    layers, head = config.layers * config.dim * (head_channels + 3 * config.hidden), target.vocab * config.dim
    sequences = engine.guidance.branches * engine.batch
    rows = sequences * engine.proposer.size
    context = target.slots + target.length / 2
    keys_values = 2 * config.layers * config.num_kv_heads * config.head_dim * context * sequences
    attention = 4 * config.layers * config.heads * config.head_dim * context
    cache_bytes = torch.empty(0, dtype=engine.cache.kv.dtype).element_size()
    weight_bytes = BYTES_PER_WEIGHT.get(pipe.dtype.partition(",")[0], cache_bytes)
    num_bytes = layers * weight_bytes + (head + keys_values) * cache_bytes
    return num_bytes, rows * (2 * (layers + head) + attention)


def profile_race(race: Race, table: Sequence[Mapping[str, Any]], folder: Path) -> list[list[str]]:
    """Write profile-METHOD.txt and profile-METHOD.json for every method; return rows of COLUMNS.

    table: the rows of `report.rows`. Their phases were timed without the profiler, which slows small operations down.
    """
    cuda = race.pipe.device.type == "cuda"
    time_key = f"self_{'device' if cuda else 'cpu'}_time_total"
    weight = next(race.pipe.target.parameters())
    rates = machine_rates(weight.device, backend(weight.device).gemm_dtype(weight))
    profile_rows = []
    for entry, row in track("profiling", list(zip(race.entries, table, strict=True))):
        engine = race.engines[entry.label]
        # Parts that are built on first use are not profiled.
        race.draw(entry, 0, race.seed)
        seeds = range(race.seed, race.seed + race.batch_size)
        profiler = profile_steps(engine, [race.prompts[0]] * race.batch_size, seeds)
        averages, name = profiler.key_averages(), f"profile-{entry.slug}"
        write_text(folder / f"{name}.txt", averages.table(time_key, ROWS, max_name_column_width=60))
        with replacing(folder / f"{name}.json") as temporary:
            profiler.export_chrome_trace(str(temporary))
        # On a GPU the time of a kernel is also that of the operation that started it, and of the phase around it.
        times = Counter[str]()
        for average in averages:
            if not cuda or (average.device_type == DeviceType.CPU and not average.is_user_annotation):
                times[average.key] += getattr(average, time_key)
        # The sum is 0 where the driver lets nobody trace kernels.
        shares = [f"{key} {100 * time / (times.total() or 1):.0f}" for key, time in times.most_common(TOP)]
        seconds = row["phases"]["pass"] * row["seconds"] / row["steps"]
        costs = zip(pass_costs(race.pipe, engine), rates, strict=True)
        figures = [f"{1000 * seconds:.3g}", *(f"{100 * cost / seconds / rate:.0f}" for cost, rate in costs)]
        profile_rows.append([row["method"], cell(row, "where"), *figures, ", ".join(shares)])
    return profile_rows


def profile_steps(engine: Engine, conditions: Sequence[str | None], seeds: Sequence[int]) -> profile:
    """Run the first steps of a batch of pictures, after their prefills, under torch.profiler."""
    # Without this level the profiler writes to stderr when it starts and ends.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    cuda = [ProfilerActivity.CUDA] if engine.codes.device.type == "cuda" else []
    marks = PhaseMarks()
    with open_batch(engine, conditions, seeds) as batch, AdaptiveThreads(engine.target.decoder) as threads:
        run = batch.run()
        list(islice(run, engine.batch))
        if isinstance(engine.run, GraphedParts):
            engine.run.forget(None)  # the profiler sees no operations in a CUDA graph
        engine.observers.append(marks)
        try:
            with profile(activities=[ProfilerActivity.CPU, *cuda]) as profiler, marks.current:
                for _ in islice(run, STEPS):
                    threads.update()
        finally:
            engine.observers.remove(marks)
    return profiler
