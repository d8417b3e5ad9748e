"""Prompts to measure with: a file of the user's, or those that a model folder brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.util.jsonfile import LINES, read_text

PROMPTS = "prompts.txt"


def read_prompts(path: Path | None, model: Path) -> list[str]:
    """One prompt per line, empty lines and lines that begin with # left out.

    path None: the model folder's own. Raises InputError where there is none.
    """
    model_file = model / PROMPTS
    if path is None and not model_file.is_file():
        raise InputError(f"{model} brings no {PROMPTS}; give --prompts FILE with one prompt per line")
    source = path or model_file
    lines = read_text(source, "give a file with one prompt per line", LINES).splitlines()
    prompts = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not prompts:
        raise InputError(f"prompts {source} holds none; write one prompt per line")
    return prompts


def usual_conditions(model: Path, target: Target) -> Sequence[str | None]:
    """What to draw where nobody says: the model's own list of prompts, some of its conditions, or the null condition."""
    if (model / PROMPTS).is_file():
        return read_prompts(None, model)
    known = target.conditions
    return known[:: max(1, len(known) // 25)] or [None]


def spread(prompts: Sequence[str], count: int) -> list[str]:
    """`count` of some prompts: evenly over them where they are more, in turn where they are fewer."""
    return [
        prompts[i * len(prompts) // count if count < len(prompts) else i % len(prompts)] for i in range(count)
    ]
