"""The acceptance rates that a drafter is stored with: counted on pictures that its target draws with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

from lanternpp.api.fit.rates import FILE, Counts, strength
from lanternpp.api.options import Settings
from lanternpp.api.pipeline import Pipeline
from lanternpp.engine.batching import ContinuousBatch
from lanternpp.engine.observers import AcceptanceByRank
from lanternpp.util.files import write_text

DEEPEST = 16
PASSES, BATCH = 500, 2
LAMBDAS = (1.5, 2.0, 3.0)


def strengths(pipe: Pipeline, kind: str) -> list[Settings]:
    """The methods and strengths whose rates are stored with a drafter of this kind, "parallel" or "eagle", or, "jacobi", with a model.

    Each has the deepest draft, from whose rates those of shorter ones are read.
    """
    depth = min(DEEPEST, pipe.target.length // 4)  # only drafts with room for all levels are counted
    chain: dict[str, Any] = {"proposer": "parallel", "tree": f"chain-{depth}"}
    named: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "parallel": [("parallel", chain), *(("lantern++", chain | {"lam": lam}) for lam in LAMBDAS)],
        "jacobi": [(name, {"window": depth}) for name in ("jacobi", "jacobi-coupled", "lantern-jacobi")],
        "eagle": [("eagle", {})],
    }
    return [pipe.settings(method, batch_size=BATCH, **dials) for method, dials in named[kind]]


def record(
    pipe: Pipeline,
    methods: Sequence[Settings],
    folder: Path,
    prompts: Sequence[str | None],
    passes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Draw with each of these settings for so many passes, by default PASSES, and write the rates of models of codes to
    `acceptance.json` in a folder. Returns codes per pass by method and strength."""
    rows, found, passes = list[dict[str, Any]](), dict[str, float](), passes or PASSES
    for place, settings in enumerate(methods):
        engine = pipe.new_engine(settings)
        counter = AcceptanceByRank(pipe.target.length)
        engine.observers.append(counter)
        batch = ContinuousBatch(engine, zip(cycle(prompts), count(), strict=False))
        for _ in islice(batch.run(), 8 * passes):  # none are counted where no draft fits into a picture
            done = int(getattr(counter, "passes", 0))
            if progress:
                progress(place * passes + min(done, passes), len(methods) * passes)
            if done >= passes:
                break
        if int(getattr(counter, "passes", 0)):
            counts = Counts.of(counter)
            rows.append({"method": settings.method, "strength": strength(settings), "counts": asdict(counts)})
            relaxed = f" lambda {settings.lam:g}" if settings.lam is not None else ""
            found[f"{settings.method}{relaxed}"] = int(counter.codes) / counts.passes
    if not pipe.target.channels:
        write_text(folder / FILE, json.dumps({"acceptance": rows}) + "\n")
    return found
