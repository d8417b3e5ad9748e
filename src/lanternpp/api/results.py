"""Results of drawing: finished and unfinished pictures from codes, and statistics of the run."""

from __future__ import annotations

import json
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
OUTPUTS = ("pil", "np", "pt", CODES)  # types of the returned pictures
GREY = (128, 128, 128)


def versions() -> dict[str, str]:
    """Return the versions of the software that a result depends on."""
    return {
        "lanternpp": lanternpp.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What pictures are drawn with, besides their prompts and seeds.

    settings: `Settings` as a dictionary, with the device, the dtype, and the effect of 8-bit weights.
    """

    model: str
    settings: dict[str, Any] = field(repr=False)
    versions: dict[str, str] = field(default_factory=versions, repr=False)
    auto: str | None = None  # the reason why method="auto" took this method; None: the caller named it

    def notes(self, prompt: str, seed: int, images: int = 1) -> dict[str, str]:
        """Return the text chunks of a PNG: everything that drawing it again needs, and nothing that varies between equal runs."""
        return {
            "prompt": prompt,
            "seed": str(seed),
            "images": str(images),
            "model": self.model,
            "settings": json.dumps(self.settings, sort_keys=True),
            "versions": json.dumps(self.versions, sort_keys=True),
        }


@dataclass(frozen=True, kw_only=True)
class Stats(Setup):
    """Statistics of a run. Seconds cover decoding and pixels, not loading."""

    method: str
    images: int
    codes: int
    passes: int
    codes_per_pass: float
    seconds: float
    seconds_per_image: float
    accepted_per_pass: list[int] = field(repr=False)
    tv_cost: float | None = None  # mean per picture of the total variation cost of relaxed acceptance
    tv_cost_per_image: list[float] = field(default_factory=list, repr=False)  # empty: not measured

    @classmethod
    def of(cls, setup: Setup, samples: Sequence[FinishedSample], seconds: float) -> Stats:
        """Return the statistics of pictures."""
        accepted = [count for sample in samples for count in sample.accepted]
        costs = [sample.tv_cost for sample in samples if sample.tv_cost is not None]
        codes = sum(accepted)
        return cls(
            **vars(setup),
            method=setup.settings["method"],
            images=len(samples),
            codes=codes,
            passes=len(accepted),
            codes_per_pass=codes / max(1, len(accepted)),
            seconds=seconds,
            seconds_per_image=seconds / max(1, len(samples)),
            accepted_per_pass=accepted,
            tv_cost=sum(costs) / len(costs) if costs else None,
            tv_cost_per_image=costs,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as a plain dictionary."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Result(Generic[Pictures]):
    """Pictures, their codes, and statistics of the run."""

    images: Pictures  # a list of PIL images, or the type of `output_type`
    codes: Tensor  # [n, length] int64; of a continuous target latents, [n, length, C] float32
    stats: Stats
    seeds: list[int] = field(default_factory=list)  # by picture, each draws it again with its batch size


@dataclass(frozen=True, eq=False)
class Partial:
    """Pictures that are being drawn, after a prompt was read or a pass was made.

    codes: the codes decided so far of every picture, in the order of the result, [decided] int64; empty before its prefill.
    total: the number of codes that all pictures have once finished. result: of the call, in the last partial of a stream.
    """

    codes: list[Tensor]
    total: int
    target: Target = field(repr=False)
    result: Result[list[Image.Image]] | None = field(default=None, repr=False)

    @property
    def decided(self) -> int:
        """The number of codes decided so far, of all pictures."""
        return sum(map(len, self.codes))

    @cached_property
    def images(self) -> list[Image.Image]:
        """The pictures so far, grey where no codes are decided yet. Takes as long as decoding finished pictures."""
        if self.result is not None:
            return self.result.images
        return [unfinished(self.target, codes) for codes in self.codes]


class UnfinishedError(KeyboardInterrupt):
    """Ctrl-C while pictures were drawn: `result` has the finished pictures, `seeds` their seeds."""

    def __init__(self, result: Result[Any]):
        super().__init__()
        self.result, self.seeds = result, result.seeds

    def __reduce__(self) -> tuple[object, ...]:
        return UnfinishedError, (self.result,)


def check_output(target: Target, kind: str = "pil") -> None:
    """Check that `kind` is one of `OUTPUTS`, and that this target's codes can become it; raise InputError."""
    if kind not in OUTPUTS:
        raise InputError(unknown("output_type", str(kind), OUTPUTS))
    if kind != CODES and target.without_pixels:
        raise InputError(target.without_pixels)


def output(target: Target, codes: Tensor, kind: str = "pil") -> Any:
    """Decode codes [n, length] to n pictures of height H and width W.

    kind: "pil", a list of PIL images; "np", an array [n, H, W, 3] of float32 in 0 to 1; "pt", a tensor [n, 3, H, W] of the
    same on the target's device; "codes", an empty list.
    """
    if kind == "pil":
        return images(target, codes)
    if kind == CODES:
        return []
    pixels = torch.cat([(_pixels(target, row) + 1) / 2 for row in codes.split(1)])  # [n, 3, H, W]
    return pixels.permute(0, 2, 3, 1).cpu().numpy() if kind == "np" else pixels


def images(target: Target, codes: Tensor) -> list[Image.Image]:
    """Decode codes [n, length] to n pictures, one at a time, so that their rounding does not depend on n."""
    pictures: list[Image.Image] = []
    with AdaptiveThreads(target.decoder):
        for row in codes.split(1):
            levels = ((_pixels(target, row)[0] + 1) * 127.5).round().byte()  # [3, H, W]
            pictures.append(Image.fromarray(levels.permute(1, 2, 0).cpu().numpy()))
    return pictures


def grid(target: Target, size: tuple[int, int]) -> tuple[int, int]:
    """Return the columns and rows of codes in a picture, without the codes that only end a row. size: width, height in pixels."""
    # The last row may be shorter than `width`, as no code ends it.
    rows = -(-target.length // target.width)
    width, height = size
    return min(target.width, round(rows * width / height)), rows


def unfinished(target: Target, codes: Tensor) -> Image.Image:
    """Decode the first codes [decided] of a picture, grey below them, in the time of a finished picture.

    For decoding, every undecided code repeats the decided code above it: the decided part then has much the same
    surroundings, and looks much the same, as in the finished picture.
    """
    decided = len(codes)
    codes = (codes if decided else target.examples(1)).cpu()
    index = torch.arange(target.length, device="cpu")
    rows_up = (index - decided) // target.width + 1  # [length], to the nearest decided code
    source = index.where(index < decided, index - rows_up * target.width).clamp(min=0)  # [length]
    (image,) = images(target, codes[source][None].to(next(target.parameters()).device))
    if decided < target.length:
        columns, rows = grid(target, image.size)
        row, column = divmod(decided, target.width)
        top, middle = round(row * image.height / rows), round((row + 1) * image.height / rows)
        image.paste(GREY, (round(min(column / columns, 1) * image.width), top, image.width, middle))
        image.paste(GREY, (0, middle, image.width, image.height))
    return image


@inference()
def _pixels(target: Target, codes: Tensor) -> Tensor:
    """Decode codes [1, length] to pixels [1, 3, H, W] of float32 in [-1, 1]."""
    return target.pixels(codes).float().clamp(-1, 1)
