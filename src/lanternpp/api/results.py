"""Results of drawing: pictures from codes, also unfinished ones, and statistics of the run."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from PIL import Image
from torch import Tensor

import lanternpp
from lanternpp.engine.decode import FinishedSample
from lanternpp.engine.threads import AdaptiveThreads
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.util.devices import inference
from lanternpp.util.registry import unknown

Pictures = TypeVar("Pictures")
CODES = "codes"
OUTPUTS = ("pil", "np", "pt", CODES)  # what pictures may be returned as
GREY = (128, 128, 128)


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
    tv_cost: float | None = None  # mean per picture of the total variation cost of relaxed acceptance
    tv_cost_per_image: list[float] = field(default_factory=list, repr=False)  # empty: not measured
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
        costs = [s.tv_cost for s in samples if s.tv_cost is not None]
        codes = sum(accepted)
        return cls(
            method=settings["method"],
            model=model,
            images=len(samples),
            codes=codes,
            passes=len(accepted),
            codes_per_pass=codes / max(1, len(accepted)),
            seconds=seconds,
            seconds_per_image=seconds / max(1, len(samples)),
            accepted_per_pass=accepted,
            settings=settings,
            versions=versions(),
            tv_cost=sum(costs) / len(costs) if costs else None,
            tv_cost_per_image=costs,
            auto=auto,
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Result(Generic[Pictures]):
    """Pictures, their codes, and statistics of the run."""

    images: Pictures  # a list of PIL images, or what `output_type` says
    codes: Tensor  # [n, length] int64; of a continuous target latents, [n, length, C] float32
    stats: Stats
    # Of each picture, which is drawn again with its seed alone.
    seeds: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Partial:
    """Pictures that are being drawn, after a prompt was read or a pass was made.

    codes: for every picture, in the order of the result, those decided so far, [decided] int64; none of one that is not
    begun. total: the codes of all pictures. result: with the last of a stream, as a call returns it.
    """

    codes: list[Tensor]
    total: int
    target: Target = field(repr=False)
    result: Result[list[Image.Image]] | None = field(default=None, repr=False)

    @property
    def decided(self) -> int:
        """Codes decided so far, of all pictures."""
        return sum(map(len, self.codes))

    @cached_property
    def images(self) -> list[Image.Image]:
        """The pictures so far, grey where nothing is decided yet. Takes as long as decoding finished ones."""
        if self.result is not None:
            return self.result.images
        return [unfinished(self.target, codes) for codes in self.codes]


class UnfinishedError(KeyboardInterrupt):
    """Ctrl-C while pictures were drawn: `result` has those that were finished, `seeds` their seeds."""

    def __init__(self, result: Result[Any]):
        super().__init__()
        self.result, self.seeds = result, result.seeds


def versions() -> dict[str, str]:
    """The versions a result depends on."""
    return {
        "lanternpp": lanternpp.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def check_output(target: Target, kind: str = "pil") -> None:
    """InputError unless `kind` is one of `OUTPUTS` that this target's codes can become."""
    if kind not in OUTPUTS:
        raise InputError(unknown("output_type", str(kind), OUTPUTS))
    if kind != CODES and target.without_pixels:
        raise InputError(target.without_pixels)


def output(target: Target, codes: Tensor, kind: str = "pil") -> Any:
    """codes [n, length] -> n pictures of height H and width W.

    kind: "pil", a list of PIL images; "np", an array [n, H, W, 3] of float32 in 0 to 1; "pt", a tensor [n, 3, H, W] of the
    same on the target's device; "codes", an empty list.
    """
    if kind == "pil":
        return images(target, codes)
    if kind == CODES:
        return []
    unit = torch.cat([(_pixels(target, one) + 1) / 2 for one in codes.split(1)])
    return unit.permute(0, 2, 3, 1).cpu().numpy() if kind == "np" else unit


def images(target: Target, codes: Tensor) -> list[Image.Image]:
    """codes [n, length] -> n pictures, one at a time: their rounding does not depend on n."""
    drawn: list[Image.Image] = []
    with AdaptiveThreads(target.decoder):
        for one in codes.split(1):
            levels = ((_pixels(target, one)[0] + 1) * 127.5).round().byte()
            drawn.append(Image.fromarray(levels.permute(1, 2, 0).cpu().numpy()))
    return drawn


def grid(target: Target, size: tuple[int, int]) -> tuple[int, int]:
    """Columns and rows of codes in a picture of this size in pixels, without the codes that only end a row."""
    # no code ends the last row
    rows = -(-target.length // target.width)
    width, height = size
    return min(target.width, round(rows * width / height)), rows


def unfinished(target: Target, codes: Tensor) -> Image.Image:
    """A picture whose first codes, [decided], are known; the rest is grey. Takes as long as decoding a finished one.

    For decoding, every unknown code repeats the known one above it, so that the known part has much the same surroundings,
    and looks much the same, as in the finished picture.
    """
    decided, known = len(codes), (codes if len(codes) else target.examples(1)).cpu()
    place = torch.arange(target.length)
    above = (place - decided) // target.width + 1  # rows up to a decided code
    source = place.where(place < decided, place - above * target.width).clamp(min=0)
    (image,) = images(target, known[source][None].to(next(target.parameters()).device))
    if decided < target.length:
        columns, rows = grid(target, image.size)
        row, column = divmod(decided, target.width)
        top, middle = round(row * image.height / rows), round((row + 1) * image.height / rows)
        image.paste(GREY, (round(min(column / columns, 1) * image.width), top, image.width, middle))
        image.paste(GREY, (0, middle, image.width, image.height))
    return image


@inference()
def _pixels(target: Target, codes: Tensor) -> Tensor:
    """codes [1, length] -> [1, 3, H, W] of float32 in [-1, 1]."""
    return target.pixels(codes).float().clamp(-1, 1)
