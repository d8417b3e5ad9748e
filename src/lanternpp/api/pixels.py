"""Pictures from codes: finished and unfinished ones, as PIL images, arrays or tensors."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn.backend import backend
from lanternpp.util.registry import unknown

CODES = "codes"
OUTPUTS = ("pil", "np", "pt", CODES)  # what pictures may be returned as
GREY = (128, 128, 128)


def check_output(target: Target, kind: str = "pil") -> str:
    """InputError unless `kind` is one of `OUTPUTS` that this target's codes can become."""
    if kind not in OUTPUTS:
        raise InputError(unknown("output_type", str(kind), OUTPUTS))
    if kind != CODES and target.without_pixels:
        raise InputError(target.without_pixels)
    return kind


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
    with backend().threads(target.decoder):
        for one in codes.split(1):
            levels = ((_pixels(target, one)[0] + 1) * 127.5).round().byte()
            drawn.append(Image.fromarray(levels.permute(1, 2, 0).cpu().numpy()))
    return drawn


def unfinished(target: Target, codes: Tensor) -> Image.Image:
    """A picture of which the first codes, [decided], are known; the rest is grey. Takes as long as decoding a finished one.

    For decoding, every unknown code repeats the known one above it, so that the known part has much the same surroundings,
    and looks much the same, as in the finished picture.
    """
    decided, known = len(codes), (codes if len(codes) else target.examples(1)).cpu()
    place = torch.arange(target.length)
    above = (place - decided) // target.width + 1  # rows up to a decided code
    source = place.where(place < decided, place - above * target.width).clamp(min=0)
    (image,) = images(target, known[source][None].to(next(target.parameters()).device))
    if decided < target.length:
        rows = target.length // target.width
        row, column = divmod(decided, target.width)
        top, middle = round(row * image.height / rows), round((row + 1) * image.height / rows)
        image.paste(GREY, (round(column * image.width / target.width), top, image.width, middle))
        image.paste(GREY, (0, middle, image.width, image.height))
    return image


@torch.inference_mode()
def _pixels(target: Target, codes: Tensor) -> Tensor:
    """codes [1, length] -> [1, 3, H, W] of float32 in [-1, 1]."""
    return target.pixels(codes).float().clamp(-1, 1)
