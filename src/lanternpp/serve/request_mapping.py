"""Mapping HTTP requests to pictures to draw, and pictures, finished or not, to HTTP responses."""

from __future__ import annotations

import asyncio
import base64
import io
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import IO, Any

import torch
from fastapi.exceptions import RequestValidationError
from PIL import Image
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from torch import Tensor

from lanternpp.api.model import NETWORKS
from lanternpp.api.options import check_prompt
from lanternpp.api.picture import png_bytes
from lanternpp.api.pipeline import Pipeline
from lanternpp.api.results import unfinished
from lanternpp.api.settings import PARTS, network_needed
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.serve import schemas
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.new_thread import run_in_new_thread
from lanternpp.serve.schemas import MAX_SEED, ImagesRequest
from lanternpp.serve.tickets import FinishedImage, Ticket
from lanternpp.trees.static import MAX_NODES
from lanternpp.types import Depicted
from lanternpp.util.registry import unknown

IMAGE_FIELDS = ("image", "image[]")  # of a form; OpenAI's client names several pictures "image[]"
RANDOM_SEEDS = 1 << 31  # a request without a seed gets a random one below this number
JPEG_QUALITY = 90  # unless the request gives a quality
WINDOW_DIALS = {"window", "alternatives", "window_rows"}  # the dials that decide the size of a window draft
PAUSE_FACTOR = 4  # the pause after a preview, as a multiple of the time that the preview took


class RequestMapper:
    """Turns requests into specifications of pictures, and finished pictures into responses."""

    def __init__(self, batcher: Batcher):
        self.config, self.pipe = batcher.config, batcher.pipe
        self.previews = Previews()
        self.size = "{}x{}".format(*picture_size(self.pipe))  # of pictures from text

    def edit(self, form: FormData) -> tuple[ImagesRequest, tuple[IO[bytes], ...]]:
        """Read a form; return the request and the files of its pictures. Raises InputError or RequestValidationError."""
        if type(self.pipe.target).depicted is Target.depicted:
            raise InputError(f"{self.pipe.name} draws from text alone; use /v1/images/generations")
        uploads = [value for name in IMAGE_FIELDS for value in form.getlist(name)]
        files = tuple(upload.file for upload in uploads if isinstance(upload, UploadFile))
        if not uploads or len(files) < len(uploads):
            raise InputError("an edit needs a picture; send a multipart form whose field image is a file")
        fields = {name: value for name, value in form.items() if name not in IMAGE_FIELDS}
        for name, value in fields.items():
            if not isinstance(value, str):
                raise InputError(
                    f"{name} cannot be a file; send pictures as image, and say in the prompt what to change"
                )
        try:
            return ImagesRequest.model_validate_strings(fields), files
        except ValidationError as error:
            # FastAPI's own errors begin with "body" as well.
            details = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
            raise RequestValidationError(details) from None

    def tickets(self, body: ImagesRequest, client: str, files: tuple[IO[bytes], ...] = ()) -> list[Ticket]:
        """Return the `n` pictures of a request, with ascending seeds. files: pictures to edit. Raises InputError."""
        count = body.n or 1
        check_prompt(body.prompt)
        if len(body.prompt) > self.config.prompt_limit:
            raise InputError(
                f"prompt has {len(body.prompt)} characters; this server takes at most {self.config.prompt_limit}"
            )
        if body.size not in (None, "auto", self.size):
            raise InputError(
                f"size {body.size!r} is not what {self.pipe.name} draws; use {self.size!r} or 'auto'"
            )
        for name in ("partial_images", "progress"):
            if getattr(body, name) and not body.stream:
                raise InputError(f"{name} works only with stream; set stream to true")
        if body.stream and body.response_format == "url":
            raise InputError("response_format 'url' does not go with stream, whose events have b64_json")
        overrides = body.overrides()
        for name in overrides.keys() & PARTS.keys():
            if overrides[name] not in (classes_by_name := PARTS[name][1]):
                raise InputError(unknown(name, overrides[name], classes_by_name))
        settings = self.config.settings(self.pipe, body.method, overrides)
        num_codes = (settings.window or 0) * (settings.window_rows or 1) + (settings.alternatives or 0)
        if num_codes > MAX_NODES and overrides.keys() & WINDOW_DIALS:
            raise InputError(
                f"window {settings.window} in {settings.window_rows or 1} window_rows and {settings.alternatives or 0} "
                f"alternatives are {num_codes} draft codes; ask for at most {MAX_NODES}"
            )
        network = network_needed(settings)
        if network and not self.pipe.defaults.holds(network):
            _, label = NETWORKS.get(network, ("", network))
            raise InputError(
                f"method {settings.method!r} needs a {label}, which {self.pipe.name} lacks; use another method"
            )
        self.pipe.check(settings)
        deadline = min(filter(None, (body.deadline, self.config.deadline)), default=None)
        seed = secrets.randbelow(RANDOM_SEEDS) if body.seed is None else body.seed
        if seed + count - 1 > MAX_SEED:
            raise InputError(f"seed {seed} is out of range; with n {count} use 0 to {MAX_SEED - count + 1}")
        own_shape = body.size != self.size
        return [
            Ticket(body.prompt, seed + i, settings, deadline, client, files, own_shape) for i in range(count)
        ]

    def picture(self, body: ImagesRequest, ticket: Ticket, image: FinishedImage) -> schemas.Picture:
        """Encode a picture in the requested format, with its figures; a PNG has the notes that PNGs of the command line have."""
        png_notes = self.pipe.describe(image.settings).notes(ticket.prompt, ticket.seed)
        if isinstance(ticket.prompt, Depicted):
            png_notes["shown"] = ticket.prompt.digests
        output_format = body.output_format or "png"
        file = encode(image.image, output_format, body.output_compression, png_notes)
        facts = schemas.Facts(
            seed=ticket.seed,
            method=image.settings.method,
            batch_size=image.settings.batch_size,
            codes=len(image.codes),
            passes=len(image.accepted),
            codes_per_pass=len(image.codes) / len(image.accepted),
            accepted_per_pass=list(image.accepted),
            seconds=image.seconds,
            waited=image.waited,
            tv_cost=image.tv_cost,
            settings=asdict(image.settings),
        )
        if body.response_format == "url":
            return schemas.Picture(url=f"data:image/{output_format};base64,{file}", lanternpp=facts)
        return schemas.Picture(b64_json=file, lanternpp=facts)

    def answer(
        self, body: ImagesRequest, tickets: list[Ticket], images: list[FinishedImage]
    ) -> dict[str, Any]:
        """Return the response with all pictures, as a JSON object."""
        width, height = images[0].image.size
        return schemas.ImagesResponse(
            created=int(time.time()),
            output_format=body.output_format or "png",
            size=f"{width}x{height}",
            data=[self.picture(body, *pair) for pair in zip(tickets, images, strict=True)],
            usage=usage(tickets[0].prompt, sum(len(image.codes) for image in images)),
        ).model_dump(exclude_none=True)


def usage(prompt: str, outputs: int) -> schemas.Usage:
    """Return OpenAI's token counts: the words of the prompt and the codes that it shows, and the codes of the pictures."""
    grids = prompt.pictures if isinstance(prompt, Depicted) else ()  # [rows, columns] codes of each
    words, codes = len(prompt.split()), sum(grid.numel() for grid in grids)
    detail = schemas.InputDetails(text_tokens=words, image_tokens=codes)
    inputs = words + codes
    return schemas.Usage(
        input_tokens=inputs, output_tokens=outputs, total_tokens=inputs + outputs, input_tokens_details=detail
    )


def picture_size(pipe: Pipeline) -> tuple[int, int]:
    """Return the width and height of the pictures that a model draws, in pixels."""
    indices = torch.zeros(1, pipe.target.length, dtype=torch.int64, device=pipe.device)
    blank = pipe.target.examples(1)[indices]
    return run_in_new_thread(pipe.images, blank)[0].size


def half_drawn(target: Target, codes: Tensor) -> Image.Image:
    """Draw a picture whose first codes, [decided], are known, as `results.unfinished`."""
    return run_in_new_thread(unfinished, target, codes)


class Previews:
    """Draws JPEGs of the unfinished pictures of all clients: one at a time, in at most a fifth of the time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._next_start = 0.0  # time.monotonic()

    async def draw(self, ticket: Ticket) -> tuple[int, str] | None:
        """Wait for its turn, then draw the latest progress of a ticket: the number of codes, and base64 of the JPEG.

        None: the picture has been finished or given up meanwhile.
        """
        async with self._lock:
            await asyncio.sleep(self._next_start - time.monotonic())
            if ticket.done():
                return None
            assert ticket.target is not None and ticket.progress is not None
            start, codes = time.monotonic(), ticket.progress.codes
            image = await run_in_threadpool(half_drawn, ticket.target, codes)
            file = await run_in_threadpool(encode, image, "jpeg")
            self._next_start = time.monotonic() + PAUSE_FACTOR * (time.monotonic() - start)
            return len(codes), file


def encode(
    image: Image.Image, kind: str = "png", quality: int | None = None, png_notes: Mapping[str, str] = {}
) -> str:
    """Encode a picture as base64 of a png, jpeg or webp file (webp is lossless unless a quality is given)."""
    file = io.BytesIO()
    if kind == "png":
        file.write(png_bytes(image, png_notes))
    elif kind == "jpeg":
        image.save(file, format="JPEG", quality=JPEG_QUALITY if quality is None else quality)
    else:
        image.save(file, format="WEBP", lossless=quality is None, quality=80 if quality is None else quality)
    return base64.b64encode(file.getvalue()).decode("ascii")
