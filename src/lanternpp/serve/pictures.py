"""Pictures as bytes, finished or not."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Callable, Mapping

import torch
from PIL import Image
from starlette.concurrency import run_in_threadpool
from torch import Tensor

from lanternpp.picture import notes as notes_of
from lanternpp.picture import png_bytes
from lanternpp.pipeline import Pipeline, versions
from lanternpp.serve.aside import aside
from lanternpp.serve.orders import Drawn, Order

GREY = (128, 128, 128)
QUALITY = 90  # of jpeg, where nothing is said
SHARE = 4  # a preview took a second: the next one begins this many seconds later, or more


def picture_size(pipe: Pipeline) -> tuple[int, int]:
    """Width and height of the pictures that a model draws, in pixels."""
    return _pixels(pipe, torch.zeros(pipe.target.length, dtype=torch.int64)).size


def half_drawn(pipe: Pipeline, codes: Tensor) -> Image.Image:
    """What is decided of a picture, codes [decided]; the rest is grey. Costs what a picture's pixels cost.

    Until they are decided, codes below stand in for themselves: each repeats the decided one above it, so that what
    is decided looks as it will.
    """
    target, decided = pipe.target, len(codes)
    if not decided:
        return Image.new("RGB", picture_size(pipe), GREY)
    place = torch.arange(target.length)
    above = (place - decided) // target.width + 1  # rows up to one that is decided
    source = place.where(place < decided, place - above * target.width).clamp(min=0)
    image = _pixels(pipe, codes.cpu()[source])
    rows = target.length // target.width
    row, column = divmod(decided, target.width)
    top, middle = round(row * image.height / rows), round((row + 1) * image.height / rows)
    image.paste(GREY, (round(column * image.width / target.width), top, image.width, middle))
    image.paste(GREY, (0, middle, image.width, image.height))
    return image


class Previews:
    """JPEGs of what is decided, for all who watch: one at a time, in at most a fifth of the time that there is."""

    def __init__(self, pipe: Pipeline):
        self.pipe, self._turn, self._next = pipe, asyncio.Lock(), 0.0

    async def draw(self, codes: Callable[[], Tensor]) -> tuple[int, str]:
        """How many codes are seen, and base64; `codes` is asked when its turn has come."""
        async with self._turn:
            await asyncio.sleep(self._next - time.monotonic())
            began, seen = time.monotonic(), codes()
            image = await run_in_threadpool(half_drawn, self.pipe, seen)
            file = await run_in_threadpool(encode, image, "jpeg")
            self._next = time.monotonic() + SHARE * (time.monotonic() - began)
            return len(seen), file


def png_notes(pipe: Pipeline, order: Order, drawn: Drawn) -> dict[str, str]:
    """What a PNG says of how it was made, as those of the command line do."""
    return notes_of(order.prompt, order.seed, pipe.name, pipe.describe(drawn.settings), versions())


def encode(
    image: Image.Image, kind: str = "png", quality: int | None = None, notes: Mapping[str, str] | None = None
) -> str:
    """A picture as base64 of a file: png, jpeg or webp (without loss, unless a quality is given)."""
    file = io.BytesIO()
    if kind == "png":
        file.write(png_bytes(image, notes or {}))
    elif kind == "jpeg":
        image.save(file, format="JPEG", quality=QUALITY if quality is None else quality)
    else:
        image.save(file, format="WEBP", lossless=quality is None, quality=80 if quality is None else quality)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _pixels(pipe: Pipeline, codes: Tensor) -> Image.Image:
    """The picture of codes [length]."""
    device = next(pipe.target.parameters()).device
    return aside(pipe.images, codes[None].to(device))[0]
