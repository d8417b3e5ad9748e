"""The methods of a race under torch.profiler: a table of operations and a trace of each, with the phases of its steps in both."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from lanternpp.engine.batching import adaptive_threads, opened
from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import Observer, Phase
from lanternpp.evaluation.report import HEADINGS, cell
from lanternpp.evaluation.speed import Race
from lanternpp.util.files import replacing, write_text

STEPS = 32  # the first ones of a picture; a whole one may have a million operations
ROWS = 30  # of a table of operations
TOP = 4  # operations that are named beside a method
COLUMNS = (HEADINGS["method"], HEADINGS["where"], "most self time, %")


class PhaseMarks(Observer):
    """Marks the phases of an engine's steps in a profile."""

    def __init__(self) -> None:
        self.open = ExitStack()  # the mark of the phase that has begun

    def entered(self, phase: Phase) -> None:
        """End the mark of the phase before, and begin one."""
        self.open.close()
        self.open.enter_context(record_function("rest" if phase == "observe" else phase))


def profile_race(
    race: Race,
    table: Sequence[Mapping[str, Any]],
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[str]]:
    """Write profile-METHOD.txt and profile-METHOD.json for every method; returns rows of COLUMNS.

    table: the rows of `report.rows`. Their phases were timed without the profiler, which slows small operations down.
    """
    cuda, made = race.pipe.device.type == "cuda", []
    key = f"self_{'device' if cuda else 'cpu'}_time_total"
    for i, (entry, row) in enumerate(zip(race.field, table, strict=True)):
        if progress:
            progress(i, len(race.field))
        race.draw(entry, 0, race.seed)  # what is built on first use is not profiled
        seeds = range(race.seed, race.seed + race.batch)
        found = profile_steps(race.engines[entry.label], [race.prompts[0]] * race.batch, seeds)
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
        whole = sum(getattr(each, key) for each in counted)
        counted = sorted(counted, key=lambda each: -getattr(each, key))[:TOP]
        shares = [f"{each.key} {100 * getattr(each, key) / whole:.0f}" for each in counted]
        made.append([row["method"], cell(row, "where"), ", ".join(shares)])
    return made


def profile_steps(engine: Engine, conditions: Sequence[str | None], seeds: Sequence[int]) -> profile:
    """The first steps of a batch of pictures under torch.profiler, after their prompts."""
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # or the profiler writes to stderr when it starts and ends
    cuda = [ProfilerActivity.CUDA] if engine.codes.device.type == "cuda" else []
    marks = PhaseMarks()
    with opened(engine, conditions, seeds) as batch, adaptive_threads(engine) as threads:
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
