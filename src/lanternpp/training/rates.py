"""The acceptance rates that a drafter is stored with: counted on pictures that its target draws with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lanternpp.engine.batching import generate
from lanternpp.engine.observers import AcceptanceByRank
from lanternpp.errors import InputError
from lanternpp.fit.choice import shape_of
from lanternpp.fit.rates import FILE, Counts, strength
from lanternpp.nn.checkpoints import write_text
from lanternpp.pipeline import Pipeline
from lanternpp.settings import Settings, with_tree
from lanternpp.trees.shapes import is_chain

LONGEST = "chain-16"
PICTURES, BATCH = 32, 2
LAMBDAS = (1.5, 2.0, 3.0)


def strengths(pipe: Pipeline, kind: str) -> list[Settings]:
    """The methods and strengths that a drafter of this kind is stored with the rates of, each on its deepest draft."""
    named: list[tuple[str, dict[str, Any]]] = [(kind, {})]
    if kind == "parallel":
        named += [("lantern++", {"proposer": "parallel", "lam": lam}) for lam in LAMBDAS]
    found = [pipe.settings(method, batch_size=BATCH, **dials) for method, dials in named]
    return [deepest(settings) for settings in found]


def deepest(settings: Settings) -> Settings:
    """The settings with a draft that the rates of shorter ones can be read from. InputError where they have none."""
    shape = shape_of(settings)
    if shape is None:
        raise InputError(
            f"drafts of method {settings.method!r} have no fixed shape, whose acceptance could be counted"
        )
    if settings.window is not None:
        return replace(settings, window=max(settings.window, 16))
    return with_tree(settings, LONGEST) if is_chain(shape) else settings


def record(
    pipe: Pipeline,
    methods: Sequence[Settings],
    folder: Path,
    prompts: Sequence[str],
    pictures: int = PICTURES,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Draw pictures with each of these settings and write the acceptance rates to `acceptance.json` in a folder; its path."""
    rows = []
    total = len(methods) * pictures * pipe.target.length
    for place, settings in enumerate(methods):
        engine = pipe.new_engine(settings)
        counter = AcceptanceByRank(pipe.target.length)
        engine.observers.append(counter)

        def tell(done: int, of: int, before: int = place * pictures * pipe.target.length) -> None:
            if progress:
                progress(before + done, total)

        generate(engine, [prompts[i % len(prompts)] for i in range(pictures)], list(range(pictures)), tell)
        rows.append(
            {"method": settings.method, "strength": strength(settings), "counts": asdict(Counts.of(counter))}
        )
    path = folder / FILE
    write_text(path, json.dumps({"acceptance": rows}) + "\n")
    return path
