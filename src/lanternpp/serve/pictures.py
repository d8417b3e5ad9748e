"""Finished and unfinished pictures as files, and as base64 of files."""

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

from lanternpp.api.picture import notes as notes_of
from lanternpp.api.picture import png_bytes
from lanternpp.api.pipeline import Pipeline, versions
from lanternpp.api.results import unfinished
from lanternpp.serve.fresh_thread import run_in_fresh_thread
from lanternpp.serve.tickets import FinishedImage, ImageSpec

QUALITY = 90  # of jpeg, unless the request gives one
PAUSE = 4  # the pause after a preview, as a multiple of the time that it took


def picture_size(pipe: Pipeline) -> tuple[int, int]:
    """Width and height of the pictures that a model draws, in pixels."""
    blank = pipe.target.examples(1)[torch.zeros(1, pipe.target.length, dtype=torch.int64, device=pipe.device)]
    return run_in_fresh_thread(pipe.images, blank)[0].size


def half_drawn(pipe: Pipeline, codes: Tensor) -> Image.Image:
    """A picture of which the first codes, [decided], are known, as `pixels.unfinished` draws it."""
    return run_in_fresh_thread(unfinished, pipe.target, codes)


class Previews:
    """JPEGs of unfinished pictures for all clients: one at a time, in at most a fifth of the time."""

    def __init__(self, pipe: Pipeline):
        self.pipe, self._lock, self._next = pipe, asyncio.Lock(), 0.0

    async def draw(self, codes: Callable[[], Tensor]) -> tuple[int, str]:
        """The number of codes that are shown, and base64 of the JPEG.

        codes: called when this preview is next, so that it shows the latest codes.
        """
        async with self._lock:
            await asyncio.sleep(self._next - time.monotonic())
            began, seen = time.monotonic(), codes()
            image = await run_in_threadpool(half_drawn, self.pipe, seen)
            file = await run_in_threadpool(encode, image, "jpeg")
            self._next = time.monotonic() + PAUSE * (time.monotonic() - began)
            return len(seen), file


def png_notes(pipe: Pipeline, spec: ImageSpec, image: FinishedImage) -> dict[str, str]:
    """The text chunks of a PNG that say how it was made, as the command line writes them."""
    return notes_of(spec.prompt, spec.seed, pipe.name, pipe.describe(image.settings), versions())


def encode(
    image: Image.Image, kind: str = "png", quality: int | None = None, notes: Mapping[str, str] | None = None
) -> str:
    """A picture as base64 of a png, jpeg or webp file (webp is lossless unless a quality is given)."""
    file = io.BytesIO()
    if kind == "png":
        file.write(png_bytes(image, notes or {}))
    elif kind == "jpeg":
        image.save(file, format="JPEG", quality=QUALITY if quality is None else quality)
    else:
        image.save(file, format="WEBP", lossless=quality is None, quality=80 if quality is None else quality)
    return base64.b64encode(file.getvalue()).decode("ascii")
