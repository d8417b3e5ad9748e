"""From HTTP requests to pictures to draw, and from finished pictures to HTTP responses."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from typing import Any

from lanternpp.accept import RULES
from lanternpp.api.settings import KINDS
from lanternpp.errors import InputError
from lanternpp.serve import schemas
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.pictures import Previews, encode, picture_size, png_notes
from lanternpp.serve.schemas import ImagesRequest
from lanternpp.serve.tickets import FinishedImage, ImageSpec, Ticket
from lanternpp.trees import TREES
from lanternpp.util.registry import unknown

SEEDS = 1 << 31  # a seed below this is drawn where a request gives none


class RequestMapper:
    """Turns requests into pictures to draw, and finished pictures into responses."""

    def __init__(self, batcher: Batcher):
        self.batcher, self.config, self.pipe = batcher, batcher.config, batcher.pipe
        self.previews = Previews(self.pipe)
        self.size = "{}x{}".format(*picture_size(self.pipe))

    def specs(self, body: ImagesRequest, client: str) -> list[ImageSpec]:
        """The pictures of a request: `n` of them, with ascending seeds. Raises InputError."""
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
        given = body.overrides()
        for name, known in (("tree", TREES), ("accept", RULES)):
            if name in given and given[name] not in known:
                raise InputError(unknown(KINDS[name], given[name], known))
        settings = self.config.settings(self.pipe, body.method, given)
        limits = [limit for limit in (body.deadline, self.config.deadline) if limit is not None]
        seed = secrets.randbelow(SEEDS) if body.seed is None else body.seed
        return [
            ImageSpec(body.prompt, seed + i, settings, min(limits, default=None), client)
            for i in range(body.n or 1)
        ]

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
        """A picture as base64 in the format that the request asks for."""
        notes = png_notes(self.pipe, spec, image)
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
            size=self.size,
            data=data,
            usage=usage(body.prompt, codes),
        )
        return response.model_dump(exclude_none=True)


def usage(prompt: str, codes: int) -> schemas.Usage:
    """OpenAI's token counts: the words of the prompt, and the codes of the pictures."""
    words = len(prompt.split())
    return schemas.Usage(
        input_tokens=words,
        output_tokens=codes,
        total_tokens=words + codes,
        input_tokens_details=schemas.InputDetails(text_tokens=words),
    )
