"""A picture before all its codes are decided: what is known, and grey."""

from __future__ import annotations

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from lanternpp.pipeline import Pipeline
from lanternpp.targets.base import Target

GREY = "#8a8a8a"


def grid(target: Target, size: tuple[int, int]) -> tuple[int, int]:
    """Columns and rows of codes in a picture of this size; a code that ends a row is no column."""
    rows = target.length // target.width
    width, height = size
    return min(target.width, round(rows * width / height)), rows


def filled(codes: Tensor, target: Target) -> Tensor:
    """Decided codes [n], n from 1 to length -> [length]: an undecided one is like the one above it."""
    whole = torch.empty(target.length, dtype=torch.int64)
    whole[: len(codes)] = codes
    for i in range(len(codes), target.length):
        whole[i] = whole[i - target.width] if i >= target.width else whole[0]
    return whole


def partial(pipe: Pipeline, codes: Tensor) -> Image.Image:
    """The picture of the first codes [n] in raster order, grey where nothing is decided."""
    target, decided = pipe.target, len(codes)
    if not decided:
        side = Image.new("RGB", (target.width, target.length // target.width), GREY)
        return side.resize((side.width * 8, side.height * 8))
    device = next(target.parameters()).device
    image = pipe.images(filled(codes.cpu(), target)[None].to(device))[0]
    columns, rows = grid(target, image.size)
    row, column = divmod(decided, target.width)
    down, across = image.height / rows, image.width / columns
    draw = ImageDraw.Draw(image)
    if row < rows:
        top, left = round(row * down), round(min(column, columns) * across)
        if left < image.width:
            draw.rectangle((left, top, image.width, round((row + 1) * down) - 1), fill=GREY)
        if row + 1 < rows:
            draw.rectangle((0, round((row + 1) * down), image.width, image.height), fill=GREY)
    return image
