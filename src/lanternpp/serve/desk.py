"""Where requests become orders, and pictures answers."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from typing import Any

from lanternpp.errors import InputError
from lanternpp.registry import unknown
from lanternpp.serve import schemas
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.orders import Drawn, Order, Ticket
from lanternpp.serve.pictures import Previews, encode, picture_size, png_notes
from lanternpp.serve.schemas import ImagesRequest
from lanternpp.serve.terms import Terms
from lanternpp.trees import TREES

SEEDS = 1 << 31  # of pictures for which none is asked


class Desk:
    """Turns requests into orders, and pictures into answers."""

    def __init__(self, batcher: Batcher, terms: Terms):
        self.batcher, self.terms, self.pipe = batcher, terms, batcher.pipe
        self.previews = Previews(self.pipe)
        self.size = "{}x{}".format(*picture_size(self.pipe))

    def orders(self, asked: ImagesRequest, client: str) -> list[Order]:
        """One order per picture. Raises InputError."""
        if len(asked.prompt) > self.terms.prompt:
            raise InputError(
                f"the prompt has {len(asked.prompt)} characters; this server takes at most {self.terms.prompt}"
            )
        if asked.size not in (None, "auto", self.size):
            raise InputError(
                f"size {asked.size!r} is not what {self.pipe.name} draws; use {self.size!r} or 'auto'"
            )
        for name in ("partial_images", "progress"):
            if getattr(asked, name) and not asked.stream:
                raise InputError(f"{name} comes with stream only; set stream to true")
        given = asked.overrides()
        if given.get("tree", next(iter(TREES))) not in TREES:
            raise InputError(unknown("tree", given["tree"], TREES))
        settings = self.terms.settings(self.pipe, asked.method, given)
        limits = [limit for limit in (asked.deadline, self.terms.deadline) if limit is not None]
        seed = secrets.randbelow(SEEDS) if asked.seed is None else asked.seed
        return [
            Order(asked.prompt, seed + i, settings, min(limits, default=None), client)
            for i in range(asked.n or 1)
        ]

    def facts(self, order: Order, drawn: Drawn) -> schemas.Facts:
        """How a picture was drawn."""
        return schemas.Facts(
            seed=order.seed,
            method=drawn.settings.method,
            rows=drawn.rows,
            codes=len(drawn.codes),
            passes=len(drawn.accepted),
            codes_per_pass=len(drawn.codes) / len(drawn.accepted),
            accepted_per_pass=list(drawn.accepted),
            seconds=drawn.seconds,
            waited=drawn.waited,
            tv_spent=drawn.tv_spent,
            settings=asdict(drawn.settings),
        )

    def file(self, asked: ImagesRequest, order: Order, drawn: Drawn) -> str:
        """A picture as base64 of the format asked for."""
        notes = png_notes(self.pipe, order, drawn)
        return encode(drawn.image, asked.output_format or "png", asked.output_compression, notes)

    def answer(self, asked: ImagesRequest, tickets: list[Ticket], drawn: list[Drawn]) -> dict[str, Any]:
        """The response with all pictures."""
        kind, data = asked.output_format or "png", []
        for ticket, one in zip(tickets, drawn, strict=True):
            file, facts = self.file(asked, ticket.order, one), self.facts(ticket.order, one)
            url = f"data:image/{kind};base64,{file}" if asked.response_format == "url" else None
            data.append(schemas.Picture(b64_json=None if url else file, url=url, lanternpp=facts))
        codes = sum(len(one.codes) for one in drawn)
        response = schemas.ImagesResponse(
            created=int(time.time()),
            output_format=kind,
            size=self.size,
            data=data,
            usage=usage(asked.prompt, codes),
        )
        return response.model_dump(exclude_none=True)


def usage(prompt: str, codes: int) -> schemas.Usage:
    """Words in, codes out."""
    words = len(prompt.split())
    return schemas.Usage(
        input_tokens=words,
        output_tokens=codes,
        total_tokens=words + codes,
        input_tokens_details=schemas.InputDetails(text_tokens=words),
    )
