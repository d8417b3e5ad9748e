"""Results of drawing: pictures, and statistics of the run."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor

import lanternpp
from lanternpp.engine.decode import FinishedSample


@dataclass(frozen=True)
class Stats:
    """Statistics of a run. Seconds cover decoding and pixels, not loading."""

    method: str
    model: str
    images: int
    codes: int
    passes: int
    codes_per_pass: float
    seconds: float
    seconds_per_image: float
    accepted_per_pass: list[int] = field(repr=False)
    settings: dict[str, Any] = field(repr=False)
    versions: dict[str, str] = field(repr=False)
    tv_spent: float | None = None  # mean per picture of the total variation cost of relaxed acceptance
    tv_spent_per_image: list[float] = field(default_factory=list, repr=False)  # empty: not measured
    auto: str | None = None  # why method="auto" took this method; None: it was named

    @classmethod
    def of(
        cls,
        samples: Sequence[FinishedSample],
        seconds: float,
        model: str,
        settings: dict[str, Any],
        auto: str | None,
    ) -> Stats:
        """Of pictures that were drawn with these settings, as `Pipeline.describe` gives them."""
        accepted = [count for s in samples for count in s.accepted]
        costs = [s.tv_spent for s in samples if s.tv_spent is not None]
        codes = sum(accepted)
        return cls(
            method=settings["method"],
            model=model,
            images=len(samples),
            codes=codes,
            passes=len(accepted),
            codes_per_pass=codes / len(accepted),
            seconds=seconds,
            seconds_per_image=seconds / len(samples),
            accepted_per_pass=accepted,
            settings=settings,
            versions=versions(),
            tv_spent=sum(costs) / len(costs) if costs else None,
            tv_spent_per_image=costs,
            auto=auto,
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class Result:
    """Pictures, their codes, and statistics of the run."""

    images: list[Image.Image]
    codes: Tensor  # [n, length] int64; of a continuous target latents, [n, length, C] float32
    stats: Stats


class UnfinishedError(KeyboardInterrupt):
    """Ctrl-C while pictures were drawn: `result` has those that were finished, `seeds` their seeds."""

    def __init__(self, result: Result, seeds: Sequence[int]):
        super().__init__()
        self.result, self.seeds = result, list(seeds)


def versions() -> dict[str, str]:
    """The versions a result depends on."""
    return {
        "lanternpp": lanternpp.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def drawn_with(method: str, auto: str | None) -> str:
    """A method as users read it, with the reason where `auto` chose it."""
    return method if auto is None else f"{method} (auto: {auto})"
