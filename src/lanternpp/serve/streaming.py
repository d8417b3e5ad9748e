"""Pictures as server-sent events: their progress while they are drawn, and each as soon as it is finished."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from lanternpp.serve.error_responses import response_for
from lanternpp.serve.request_mapping import RequestMapper, encode, half_drawn, size_of, usage
from lanternpp.serve.schemas import ImagesRequest
from lanternpp.serve.tickets import Ticket
from lanternpp.types import Depicted

KEEPALIVE = 15.0  # seconds without an event after which a comment is sent to keep the connection open
SNAPSHOT = 0.02  # least seconds between two checks of a picture, whether a partial image is due
EVERY = 0.3  # least seconds between two progress events of a picture

Event = dict[str, Any]


class PictureStream(StreamingResponse):
    """The events of a request. Its pictures are cancelled when the connection ends, as it does where the client reads nothing.

    What is kept for a slow client is bounded: of a picture's progress and previews only the latest.
    """

    def __init__(
        self, mapper: RequestMapper, body: ImagesRequest, tickets: list[Ticket], warnings: Sequence[str] = ()
    ):
        """warnings: the target's warnings of the prompt; sent first where the request has `progress`."""
        self.mapper, self.image_request, self.tickets = mapper, body, tickets
        self.kind = body.output_format or "png"
        self._pending: dict[
            tuple[str, int, int], Event
        ] = {}  # events to be sent, by kind, index of the picture, number
        self._changed = asyncio.Event()
        self._running = len(tickets)
        if body.progress:
            self._send("accepted", 0, warnings=list(warnings))
        super().__init__(self._lines(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. However that ends, unfinished pictures are cancelled."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for ticket in self.tickets:
                ticket.cancel()

    async def _lines(self) -> AsyncIterator[str]:
        """The events as text, in the order in which they happen."""
        drawing = [asyncio.create_task(self._draw(i)) for i in range(len(self.tickets))]
        try:
            while self._running or self._pending:
                try:
                    await asyncio.wait_for(self._changed.wait(), KEEPALIVE)
                except TimeoutError:
                    yield ": still at it\n\n"
                    continue
                self._changed.clear()
                while self._pending:
                    event = self._pending.pop(next(iter(self._pending)))
                    yield f"event: {event.get('type', 'error')}\ndata: {json.dumps(event)}\n\n"
                    if "error" in event:
                        return
        finally:
            for task in drawing:
                task.cancel()

    async def _draw(self, index: int) -> None:
        """Send all events of one picture; an error is an event too."""
        try:
            await self._picture(index, self.tickets[index])
        except Exception as error:
            self._pending["error", index, 0] = json.loads(bytes(response_for(error).body))
        self._running -= 1
        self._changed.set()

    async def _picture(self, index: int, ticket: Ticket) -> None:
        """Send the events of one picture. Raises what drawing it raised."""
        mapper, body = self.mapper, self.image_request
        previews = asyncio.create_task(self._preview(index, ticket)) if body.progress else None
        try:
            if body.progress or body.partial_images:
                await self._follow(index, ticket)
            image = await ticket.finished()
        finally:
            if previews:
                previews.cancel()
        file = await run_in_threadpool(mapper.file, body, ticket.spec, image)
        facts = mapper.facts(ticket.spec, image).model_dump(exclude_none=True)
        tokens = usage(ticket.spec.prompt, len(image.codes)).model_dump()
        for outdated in ("progress", "preview"):
            self._pending.pop((outdated, index, 0), None)
        self._send_image("completed", index, image.image, file, usage=tokens, lanternpp=facts)

    async def _follow(self, index: int, ticket: Ticket) -> None:
        """Send the progress and partial images of a picture while it is drawn; `_preview` sends the previews."""
        body, target = self.image_request, ticket.target
        assert target is not None
        parts, length = body.partial_images or 0, target.length
        due = [length * (i + 1) / (parts + 1) for i in range(parts)]  # codes at which a partial image is sent
        sent = number = 0
        told = -EVERY  # time.monotonic() of the last progress event
        async for progress in ticket.follow(SNAPSHOT if parts else EVERY):
            if body.progress and time.monotonic() - told >= EVERY - SNAPSHOT:
                told = time.monotonic()
                passes = list(progress.accepted)
                self._send("progress", index, accepted_per_pass=passes, seconds=progress.seconds)
            passed = sum(len(progress.codes) >= mark for mark in due)
            if passed > sent:
                image = await run_in_threadpool(half_drawn, target, progress.codes)
                file = await run_in_threadpool(encode, image, self.kind, body.output_compression)
                self._send_image("partial_image", index, image, file, partial_image_index=number)
                sent, number = passed, number + 1
            if sent == len(due) and not body.progress:
                return

    async def _preview(self, index: int, ticket: Ticket) -> None:
        """Send a JPEG of the codes decided so far, again and again, until this task is cancelled."""
        seen, target = 0, ticket.target
        assert target is not None
        while True:
            await asyncio.sleep(EVERY)
            if (latest := ticket.progress) is not None and len(latest.codes) > seen:
                seen, file = await self.mapper.previews.draw(
                    target, lambda: (ticket.progress or latest).codes
                )
                self._send("preview", index, codes=seen, b64_json=file, output_format="jpeg")

    def _send_image(self, what: str, index: int, image: Image.Image, file: str, **more: Any) -> None:
        """Queue an event of OpenAI's API, which has a picture."""
        event = {
            "b64_json": file,
            "created_at": int(time.time()),
            "size": size_of(image),
            "quality": "auto",
            "background": "opaque",
            "output_format": self.kind,
        }
        self._send(what, index, **event, **more)

    def _send(self, what: str, index: int, **event: Any) -> None:
        """Queue an event; it replaces an unsent one of the same kind, picture and number."""
        key = what, index, event.get("partial_image_index", 0)
        self._pending.pop(key, None)
        task = "edit" if isinstance(self.tickets[0].spec.prompt, Depicted) else "generation"
        self._pending[key] = {"type": f"image_{task}.{what}", "index": index, **event}
        self._changed.set()
