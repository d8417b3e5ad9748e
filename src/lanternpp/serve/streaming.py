"""Pictures as server-sent events: their progress while they are drawn, and each picture as soon as it is finished."""

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
from lanternpp.serve.request_mapping import RequestMapper, encode, half_drawn, usage
from lanternpp.serve.schemas import ImagesRequest
from lanternpp.serve.tickets import Ticket
from lanternpp.types import Depicted

KEEPALIVE = 15.0  # seconds without an event after which a comment is sent to keep the connection open
CHECK_INTERVAL = 0.02  # minimum seconds between two checks whether a partial image is due
PROGRESS_INTERVAL = 0.3  # minimum seconds between two progress events of a picture


class PictureStream(StreamingResponse):
    """The events of a request. Its pictures are cancelled when the connection ends, as it does where the client reads nothing.

    The events that wait for a slow client are bounded: of a picture's progress and previews only the latest is kept.
    """

    def __init__(
        self, mapper: RequestMapper, body: ImagesRequest, tickets: list[Ticket], warnings: Sequence[str] = ()
    ):
        """warnings: the target's warnings about the prompt; sent first where the request has `progress`."""
        self.mapper, self.image_request, self.tickets = mapper, body, tickets
        self.output_format = body.output_format or "png"
        # Unsent events, by their kind, the index of the picture, and the number of the partial image.
        self._pending: dict[tuple[str, int, int], dict[str, Any]] = {}
        self._changed = asyncio.Event()

        if body.progress:
            self._send("accepted", 0, warnings=list(warnings))
        super().__init__(self._lines(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; in the end, also after an error, cancel the unfinished pictures."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for ticket in self.tickets:
                ticket.cancel()

    async def _lines(self) -> AsyncIterator[str]:
        """Yield the events as text, in the order in which they happen."""
        tasks = [asyncio.create_task(self._send_all(i)) for i in range(len(self.tickets))]
        try:
            while self._pending or not all(task.done() for task in tasks):
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
            for task in tasks:
                task.cancel()

    async def _send_all(self, index: int) -> None:
        """Send all events of a picture; an error becomes an event too."""
        try:
            await self._send_picture(index, self.tickets[index])
        except Exception as error:
            self._pending["error", index, 0] = json.loads(bytes(response_for(error).body))
        self._changed.set()

    async def _send_picture(self, index: int, ticket: Ticket) -> None:
        """Send the events of a picture. Raises the error that drawing the picture raised."""
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
        for kind in ("progress", "preview"):  # outdated by the finished picture
            self._pending.pop((kind, index, 0), None)
        self._send_image("completed", index, image.image, file, usage=tokens, lanternpp=facts)

    async def _follow(self, index: int, ticket: Ticket) -> None:
        """Send the progress and partial images of a picture while it is drawn; `_preview` sends the previews."""
        body, target = self.image_request, ticket.target
        assert target is not None
        num_images = body.partial_images or 0
        # Numbers of codes at which a partial image is due. One image is sent where a step passes several of them.
        marks = [target.length * (i + 1) / (num_images + 1) for i in range(num_images)]
        num_passed = num_sent = 0
        last_progress = -PROGRESS_INTERVAL  # time.monotonic() of the last progress event
        async for progress in ticket.follow(CHECK_INTERVAL if num_images else PROGRESS_INTERVAL):
            if body.progress and time.monotonic() - last_progress >= PROGRESS_INTERVAL - CHECK_INTERVAL:
                last_progress = time.monotonic()
                accepted = list(progress.accepted)
                self._send("progress", index, accepted_per_pass=accepted, seconds=progress.seconds)
            passed_marks = [mark for mark in marks if mark <= len(progress.codes)]
            if len(passed_marks) > num_passed:
                image = await run_in_threadpool(half_drawn, target, progress.codes)
                file = await run_in_threadpool(encode, image, self.output_format, body.output_compression)
                self._send_image("partial_image", index, image, file, partial_image_index=num_sent)
                num_passed = len(passed_marks)
                num_sent += 1
            if num_passed == num_images and not body.progress:
                return

    async def _preview(self, index: int, ticket: Ticket) -> None:
        """Send a JPEG of the codes decided so far, again and again, until this task is cancelled."""
        num_shown = 0  # codes in the latest preview
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL)
            if ticket.progress is not None and len(ticket.progress.codes) > num_shown:
                num_shown, file = await self.mapper.previews.draw(ticket)
                self._send("preview", index, codes=num_shown, b64_json=file, output_format="jpeg")

    def _send_image(self, kind: str, index: int, image: Image.Image, file: str, **fields: Any) -> None:
        """Queue an event of OpenAI's API with a picture."""
        event = {
            "b64_json": file,
            "created_at": int(time.time()),
            "size": f"{image.width}x{image.height}",
            "quality": "auto",
            "background": "opaque",
            "output_format": self.output_format,
        }
        self._send(kind, index, **event, **fields)

    def _send(self, kind: str, index: int, **event: Any) -> None:
        """Queue an event; it replaces an unsent event of the same kind, picture and number."""
        key = kind, index, event.get("partial_image_index", 0)
        self._pending.pop(key, None)
        task = "edit" if isinstance(self.tickets[0].spec.prompt, Depicted) else "generation"
        self._pending[key] = {"type": f"image_{task}.{kind}", "index": index, **event}
        self._changed.set()
