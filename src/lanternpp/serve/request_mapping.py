"""From HTTP requests to pictures to draw, and from pictures, finished or not, to HTTP responses."""

from __future__ import annotations

import asyncio
import base64
import io
import secrets
import time
from collections.abc import Callable, Mapping
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
from lanternpp.api.picture import notes as notes_of
from lanternpp.api.picture import png_bytes
from lanternpp.api.pipeline import Pipeline, versions
from lanternpp.api.results import unfinished
from lanternpp.api.settings import PARTS, network_needed
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.serve import schemas
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.new_thread import run_in_new_thread
from lanternpp.serve.schemas import ImagesRequest
from lanternpp.serve.tickets import FinishedImage, ImageSpec, Ticket
from lanternpp.trees.static import MAX_NODES
from lanternpp.types import Depicted
from lanternpp.util.registry import unknown

IMAGE_FIELDS = ("image", "image[]")  # of a form; the second is how OpenAI's client names several
SEEDS = 1 << 31  # a seed below this is drawn where a request gives none
QUALITY = 90  # of jpeg, unless the request gives one
WINDOWED = {"window", "alternatives", "window_rows"}  # the dials whose product is limited, as trees are
PAUSE = 4  # the pause after a preview, as a multiple of the time that it took


class RequestMapper:
    """Turns requests into pictures to draw, and finished pictures into responses."""

    def __init__(self, batcher: Batcher):
        self.config, self.pipe = batcher.config, batcher.pipe
        self.previews = Previews()
        self.size = "{}x{}".format(*picture_size(self.pipe))  # of pictures from text

    def edit(self, form: FormData) -> tuple[ImagesRequest, tuple[IO[bytes], ...]]:
        """The request and the files of pictures in a form. Raises InputError or RequestValidationError."""
        if type(self.pipe.target).depicted is Target.depicted:
            raise InputError(f"{self.pipe.name} draws from text alone; use /v1/images/generations")
        files = [one for name in IMAGE_FIELDS for one in form.getlist(name)]
        uploads = tuple(one.file for one in files if isinstance(one, UploadFile))
        if not files or len(uploads) < len(files):
            raise InputError("an edit needs a picture; send a multipart form whose field image is a file")
        fields = {name: value for name, value in form.items() if name not in IMAGE_FIELDS}
        if name := next((name for name, value in fields.items() if not isinstance(value, str)), None):
            raise InputError(
                f"{name} cannot be a file; send pictures as image, and say in the prompt what to change"
            )
        try:
            return ImagesRequest.model_validate_strings(fields), uploads
        except ValidationError as error:
            raise RequestValidationError(
                [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
            ) from None

    def specs(self, body: ImagesRequest, client: str, files: tuple[IO[bytes], ...] = ()) -> list[ImageSpec]:
        """The pictures of a request: `n` of them, with ascending seeds; files: of pictures to edit. Raises InputError."""
        if len(body.prompt) > self.config.prompt_limit:
            raise InputError(
                f"the prompt has {len(body.prompt)} characters; this server takes at most {self.config.prompt_limit}"
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
        given = body.overrides()
        for name in given.keys() & PARTS.keys():
            called, known, *_ = PARTS[name]
            if given[name] not in known:
                raise InputError(unknown(called, given[name], known))
        settings = self.config.settings(self.pipe, body.method, given)
        codes = (settings.window or 0) * (settings.window_rows or 1) + (settings.alternatives or 0)
        if codes > MAX_NODES and given.keys() & WINDOWED:
            raise InputError(
                f"window {settings.window} in {settings.window_rows or 1} window_rows and {settings.alternatives or 0} "
                f"alternatives are {codes} draft codes; ask for at most {MAX_NODES}"
            )
        kind = network_needed(settings)
        if kind and not self.pipe.defaults.holds(kind):
            raise InputError(
                f"method {settings.method!r} needs a {NETWORKS.get(kind, ('', kind))[1]}, which {self.pipe.name} lacks; use another method"
            )
        self.pipe.check(settings)
        limits = [limit for limit in (body.deadline, self.config.deadline) if limit is not None]
        seed = secrets.randbelow(SEEDS) if body.seed is None else body.seed
        more = (settings, min(limits, default=None), client, files, body.size != self.size)
        return [ImageSpec(body.prompt, seed + i, *more) for i in range(body.n or 1)]

    def facts(self, spec: ImageSpec, image: FinishedImage) -> schemas.Facts:
        """What a response says of how a picture was drawn."""
        return schemas.Facts(
            seed=spec.seed,
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

    def file(self, body: ImagesRequest, spec: ImageSpec, image: FinishedImage) -> str:
        """A picture as base64 in the format that the request asks for; a PNG says how it was made, as the command line's do."""
        settings = self.pipe.describe(image.settings)
        notes = notes_of(spec.prompt, spec.seed, self.pipe.name, settings, versions())
        if isinstance(spec.prompt, Depicted):
            notes["shown"] = spec.prompt.digests
        return encode(image.image, body.output_format or "png", body.output_compression, notes)

    def answer(
        self, body: ImagesRequest, tickets: list[Ticket], images: list[FinishedImage]
    ) -> dict[str, Any]:
        """The response with all pictures, as a JSON object."""
        kind, data = body.output_format or "png", []
        for ticket, image in zip(tickets, images, strict=True):
            file, facts = self.file(body, ticket.spec, image), self.facts(ticket.spec, image)
            url = f"data:image/{kind};base64,{file}" if body.response_format == "url" else None
            data.append(schemas.Picture(b64_json=None if url else file, url=url, lanternpp=facts))
        codes = sum(len(image.codes) for image in images)
        response = schemas.ImagesResponse(
            created=int(time.time()),
            output_format=kind,
            size=size_of(images[0].image),
            data=data,
            usage=usage(tickets[0].spec.prompt, codes),
        )
        return response.model_dump(exclude_none=True)


def size_of(image: Image.Image) -> str:
    """Width and height as OpenAI writes them."""
    return f"{image.width}x{image.height}"


def usage(prompt: str, codes: int) -> schemas.Usage:
    """OpenAI's token counts: the words of the prompt, and the codes of the pictures."""
    words, shown = len(prompt.split()), prompt.pictures if isinstance(prompt, Depicted) else ()
    given = schemas.InputDetails(text_tokens=words, image_tokens=sum(grid.numel() for grid in shown))
    total = words + given.image_tokens
    return schemas.Usage(
        input_tokens=total, output_tokens=codes, total_tokens=total + codes, input_tokens_details=given
    )


def picture_size(pipe: Pipeline) -> tuple[int, int]:
    """Width and height of the pictures that a model draws, in pixels."""
    blank = pipe.target.examples(1)[torch.zeros(1, pipe.target.length, dtype=torch.int64, device=pipe.device)]
    return run_in_new_thread(pipe.images, blank)[0].size


def half_drawn(target: Target, codes: Tensor) -> Image.Image:
    """A picture whose first codes, [decided], are known, as `results.unfinished` draws it."""
    return run_in_new_thread(unfinished, target, codes)


class Previews:
    """JPEGs of unfinished pictures for all clients: one at a time, in at most a fifth of the time."""

    def __init__(self) -> None:
        self._lock, self._next = asyncio.Lock(), 0.0

    async def draw(self, target: Target, codes: Callable[[], Tensor]) -> tuple[int, str]:
        """The number of codes that are shown, and base64 of the JPEG.

        codes: called when this preview is next, so that it shows the latest codes.
        """
        async with self._lock:
            await asyncio.sleep(self._next - time.monotonic())
            began, seen = time.monotonic(), codes()
            image = await run_in_threadpool(half_drawn, target, seen)
            file = await run_in_threadpool(encode, image, "jpeg")
            self._next = time.monotonic() + PAUSE * (time.monotonic() - began)
            return len(seen), file


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
