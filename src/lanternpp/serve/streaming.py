"""Pictures as server-sent events: what is decided of them now and then, and each as soon as it is finished."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from lanternpp.serve.desk import Desk, usage
from lanternpp.serve.orders import Ticket
from lanternpp.serve.pictures import encode, half_drawn
from lanternpp.serve.refusals import explain
from lanternpp.serve.schemas import ImagesRequest

QUIET = 15.0  # seconds without an event after which a comment keeps the connection open
SNAPSHOT = 0.02  # least seconds between two looks at a picture
EVERY = 0.3  # least seconds between two events of its progress
STALLED = 30.0  # seconds in which a client takes nothing, after which its pictures are given up

Event = dict[str, Any]


class PictureStream(StreamingResponse):
    """The events of a request. Its pictures are given up when the client goes away, or stops reading.

    What a slow client has not read yet is bounded: of a picture's progress only the latest is kept.
    """

    def __init__(self, desk: Desk, asked: ImagesRequest, tickets: list[Ticket], warned: Sequence[str] = ()):
        """warned: what the target says of the prompt; told first where progress is asked for."""
        self.desk, self.asked, self.tickets = desk, asked, tickets
        self._news: dict[tuple[str, int, int], Event] = {}  # events to be sent, by kind, picture and number
        self._fresh = asyncio.Event()
        self._running = len(tickets)
        if asked.progress:
            self._tell("accepted", 0, warnings=list(warned))
        super().__init__(self._lines(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; whatever ends the answer ends the drawing."""

        async def sent(message: Message) -> None:
            timer = asyncio.get_running_loop().call_later(STALLED, self._give_up)
            try:
                await send(message)
            finally:
                timer.cancel()

        try:
            await super().__call__(scope, receive, sent)
        finally:
            self._give_up()

    def _give_up(self) -> None:
        for ticket in self.tickets:
            ticket.cancel()

    async def _lines(self) -> AsyncIterator[str]:
        """The events as text, in the order in which they happen."""
        drawing = [asyncio.create_task(self._draw(i)) for i in range(len(self.tickets))]
        try:
            while self._running or self._news:
                try:
                    await asyncio.wait_for(self._fresh.wait(), QUIET)
                except TimeoutError:
                    yield ": still at it\n\n"
                    continue
                self._fresh.clear()
                while self._news:
                    event = self._news.pop(next(iter(self._news)))
                    yield f"event: {event.get('type', 'error')}\ndata: {json.dumps(event)}\n\n"
                    if "error" in event:
                        return
        finally:
            for task in drawing:
                task.cancel()

    async def _draw(self, index: int) -> None:
        """The events of one picture."""
        try:
            await self._picture(index, self.tickets[index])
        except Exception as error:
            self._news["error", index, 0] = json.loads(bytes(explain(error).body))
        self._running -= 1
        self._fresh.set()

    async def _picture(self, index: int, ticket: Ticket) -> None:
        desk, asked = self.desk, self.asked
        previews = asyncio.create_task(self._preview(index, ticket)) if asked.progress else None
        try:
            if asked.progress or asked.partial_images:
                await self._watch(index, ticket)
            drawn = await ticket.drawn()
        finally:
            if previews:
                previews.cancel()
        file = await run_in_threadpool(desk.file, asked, ticket.order, drawn)
        facts = desk.facts(ticket.order, drawn).model_dump(exclude_none=True)
        counted = usage(asked.prompt, len(drawn.codes)).model_dump()
        for outdated in ("progress", "preview"):
            self._news.pop((outdated, index, 0), None)
        self._show("completed", index, file, usage=counted, lanternpp=facts)

    async def _watch(self, index: int, ticket: Ticket) -> None:
        """The events of a picture while it is drawn, but for previews."""
        desk, asked = self.desk, self.asked
        parts, length = asked.partial_images or 0, desk.pipe.target.length
        due = [length * (i + 1) / (parts + 1) for i in range(parts)]
        sent = 0
        async for progress in ticket.follow(EVERY if asked.progress else SNAPSHOT):
            if asked.progress:
                passes = list(progress.accepted)
                self._tell("progress", index, accepted_per_pass=passes, seconds=progress.seconds)
            passed = sum(len(progress.codes) >= mark for mark in due)
            if passed > sent:
                image = await run_in_threadpool(half_drawn, desk.pipe, progress.codes)
                file = await run_in_threadpool(encode, image, self.kind, asked.output_compression)
                self._show("partial_image", index, file, partial_image_index=sent)
                sent = passed
            if sent == len(due) and not asked.progress:
                return

    async def _preview(self, index: int, ticket: Ticket) -> None:
        """A picture as it grows, again and again."""
        seen = 0
        while True:
            await asyncio.sleep(EVERY)
            if (news := ticket.news) is not None and len(news.codes) > seen:
                seen, file = await self.desk.previews.draw(lambda: (ticket.news or news).codes)
                self._tell("preview", index, codes=seen, b64_json=file, output_format="jpeg")

    @property
    def kind(self) -> str:
        """The format of the files."""
        return self.asked.output_format or "png"

    def _show(self, what: str, index: int, file: str, **more: Any) -> None:
        """An event of OpenAI's, with a picture."""
        event = {
            "b64_json": file,
            "created_at": int(time.time()),
            "size": self.desk.size,
            "quality": "auto",
            "background": "opaque",
            "output_format": self.kind,
        }
        self._tell(what, index, **event, **more)

    def _tell(self, what: str, index: int, **event: Any) -> None:
        """An event to be sent; of its kind, picture and number only the latest is."""
        key = what, index, event.get("partial_image_index", 0)
        self._news.pop(key, None)
        self._news[key] = {"type": f"image_generation.{what}", "index": index, **event}
        self._fresh.set()
