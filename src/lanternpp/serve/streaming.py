"""Pictures as server-sent events: what is decided of them now and then, and each as soon as it is finished."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from lanternpp.serve.desk import Desk, usage
from lanternpp.serve.orders import Ticket
from lanternpp.serve.pictures import encode, half_drawn
from lanternpp.serve.refusals import explain
from lanternpp.serve.schemas import ImagesRequest

QUIET = 15.0  # seconds without an event after which a comment keeps the connection open
SNAPSHOT = 0.02  # least seconds between two looks at a picture

Event = dict[str, Any]


class PictureStream(StreamingResponse):
    """The events of a request. Its pictures are given up when the client goes away."""

    def __init__(self, desk: Desk, asked: ImagesRequest, tickets: list[Ticket]):
        self.desk, self.asked, self.tickets = desk, asked, tickets
        self.news: asyncio.Queue[Event | None] = asyncio.Queue()
        super().__init__(self._lines(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; whatever ends the answer ends the drawing."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for ticket in self.tickets:
                ticket.cancel()

    async def _lines(self) -> AsyncIterator[str]:
        """The events as text, in the order in which they happen."""
        drawing = [asyncio.create_task(self._draw(i)) for i in range(len(self.tickets))]
        try:
            left = len(drawing)
            while left:
                try:
                    event = await asyncio.wait_for(self.news.get(), QUIET)
                except TimeoutError:
                    yield ": still at it\n\n"
                    continue
                if event is None:
                    left -= 1
                    continue
                yield f"event: {event.get('type', 'error')}\ndata: {json.dumps(event)}\n\n"
                if "error" in event:
                    return
        finally:
            for task in drawing:
                task.cancel()

    async def _draw(self, index: int) -> None:
        """The events of one picture, then None."""
        try:
            await self._picture(index, self.tickets[index])
        except Exception as error:
            self.news.put_nowait(json.loads(bytes(explain(error).body)))
        self.news.put_nowait(None)

    async def _picture(self, index: int, ticket: Ticket) -> None:
        desk, asked = self.desk, self.asked
        parts, length = asked.partial_images or 0, desk.pipe.target.length
        due = [length * (i + 1) / (parts + 1) for i in range(parts)]
        sent = 0
        if due:
            async for progress in ticket.follow(SNAPSHOT):
                passed = sum(len(progress.codes) >= mark for mark in due)
                if passed > sent:
                    image = await run_in_threadpool(half_drawn, desk.pipe, progress.codes)
                    file = await run_in_threadpool(encode, image, self.kind, asked.output_compression)
                    self._tell("partial_image", index, file, partial_image_index=sent)
                    sent = passed
                if sent == len(due):
                    break
        drawn = await ticket.drawn()
        file = await run_in_threadpool(desk.file, asked, ticket.order, drawn)
        facts = desk.facts(ticket.order, drawn).model_dump(exclude_none=True)
        counted = usage(asked.prompt, len(drawn.codes)).model_dump()
        self._tell("completed", index, file, usage=counted, lanternpp=facts)

    @property
    def kind(self) -> str:
        """The format of the files."""
        return self.asked.output_format or "png"

    def _tell(self, what: str, index: int, file: str, **more: Any) -> None:
        event = {
            "type": f"image_generation.{what}",
            "b64_json": file,
            "created_at": int(time.time()),
            "size": self.desk.size,
            "quality": "auto",
            "background": "opaque",
            "output_format": self.kind,
            "index": index,
        }
        self.news.put_nowait(event | more)
