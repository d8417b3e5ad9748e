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
from lanternpp.serve.schemas import ImagesRequest, Picture
from lanternpp.serve.tickets import FinishedImage, Progress, Ticket
from lanternpp.types import Depicted

Encoded = tuple[FinishedImage, Picture]
KEEPALIVE = 15.0  # seconds without an event after which a comment is sent to keep the connection open
CHECK_INTERVAL = 0.03  # seconds between two checks whether an event of an unfinished picture is due
PROGRESS_INTERVAL = 0.3  # minimum seconds between two progress events, and between two previews, of a picture


class PictureStream(StreamingResponse):
    """The events of a request. Its pictures are cancelled when the connection ends, as it does where the client reads nothing.

    An event is made when the client has received the one before, so no events pile up for a slow client.
    """

    def __init__(
        self, mapper: RequestMapper, body: ImagesRequest, tickets: list[Ticket], warnings: Sequence[str] = ()
    ):
        """warnings: the target's warnings about the prompt; sent first where the request has `progress`."""
        self.mapper, self.image_request, self.tickets = mapper, body, tickets
        self.output_format = body.output_format or "png"
        # Whether there are events of unfinished pictures, and the seconds between two checks for them.
        self.follows = bool(body.progress or body.partial_images)
        self.interval = CHECK_INTERVAL if body.partial_images else PROGRESS_INTERVAL
        for ticket in tickets if self.follows else ():
            ticket.interval = self.interval
        events = self._all_events(list(warnings))
        super().__init__(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; in the end, also after an error, cancel the unfinished pictures."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for ticket in self.tickets:
                ticket.cancel()

    async def _all_events(self, warnings: list[str]) -> AsyncIterator[str]:
        """Yield the events of all pictures as text, and comments while there are none."""
        if self.image_request.progress:
            yield self._event("accepted", 0, warnings=warnings)
        images = [asyncio.create_task(self._encoded(ticket)) for ticket in self.tickets]
        unfinished = {image: self._events(index, image) for index, image in enumerate(images)}
        last_sent = time.monotonic()
        try:
            while unfinished:
                timeout = self.interval if self.follows else KEEPALIVE
                await asyncio.wait(unfinished, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for image, events in list(unfinished.items()):
                    async for event in events:
                        if event is None:
                            break
                        yield event
                        last_sent = time.monotonic()
                    else:
                        del unfinished[image]
                if time.monotonic() - last_sent >= KEEPALIVE:
                    yield ": still at it\n\n"
                    last_sent = time.monotonic()
        except Exception as error:
            yield f"event: error\ndata: {bytes(response_for(error).body).decode()}\n\n"
        finally:
            for image in images:
                image.cancel()
            # Asyncio logs exceptions that nobody retrieves.
            await asyncio.gather(*images, return_exceptions=True)

    async def _encoded(self, ticket: Ticket) -> Encoded:
        """Wait until a picture is finished, and encode it. Raises the error that drawing it raised."""
        image = await ticket.finished()
        return image, await run_in_threadpool(self.mapper.picture, self.image_request, ticket, image)

    async def _events(self, index: int, image: asyncio.Task[Encoded]) -> AsyncIterator[str | None]:
        """Yield the events of a picture as text, and None whenever there is none. Raises the error that drawing it raised."""
        body, ticket, target = self.image_request, self.tickets[index], self.tickets[index].target
        assert target is not None
        num_images = body.partial_images or 0
        # Numbers of codes at which a partial image is due. One image is sent where a step passes several of them.
        marks = [target.length * (i + 1) / (num_images + 1) for i in range(num_images)]
        num_passed = num_sent = num_shown = 0
        sent: Progress | None = None
        next_progress = next_preview = 0.0  # time.monotonic()
        preview: asyncio.Task[tuple[int, str] | None] | None = None
        while not image.done():
            progress, now = ticket.progress, time.monotonic()
            if progress is None or ticket.done():
                yield None
                continue
            num_codes = len(progress.codes)
            if body.progress and progress is not sent and now >= next_progress:
                sent, next_progress = progress, now + PROGRESS_INTERVAL
                accepted = list(progress.accepted)
                yield self._event("progress", index, accepted_per_pass=accepted, seconds=progress.seconds)
            if (passed := sum(mark <= num_codes for mark in marks)) > num_passed:
                partial = await run_in_threadpool(half_drawn, target, progress.codes)
                file = await run_in_threadpool(encode, partial, self.output_format, body.output_compression)
                yield self._image_event(
                    "partial_image", index, partial, b64_json=file, partial_image_index=num_sent
                )
                num_passed, num_sent = passed, num_sent + 1
            if preview is not None and preview.done():
                if shown := preview.result():
                    num_shown, file = shown
                    yield self._event("preview", index, codes=num_shown, b64_json=file, output_format="jpeg")
                preview = None
            elif body.progress and preview is None and num_codes > num_shown and now >= next_preview:
                next_preview = now + PROGRESS_INTERVAL
                preview = asyncio.create_task(self.mapper.previews.draw(ticket))
            yield None
        finished, picture = image.result()
        fields = picture.model_dump(exclude_none=True)
        fields["usage"] = usage(ticket.prompt, len(finished.codes)).model_dump()
        yield self._image_event("completed", index, finished.image, **fields)

    def _image_event(self, kind: str, index: int, image: Image.Image, **fields: Any) -> str:
        """Return an event of OpenAI's API with a picture, as text."""
        event = {
            "created_at": int(time.time()),
            "size": f"{image.width}x{image.height}",
            "quality": "auto",
            "background": "opaque",
            "output_format": self.output_format,
        }
        return self._event(kind, index, **event, **fields)

    def _event(self, kind: str, index: int, **fields: Any) -> str:
        """Return an event of a picture as text."""
        task = "edit" if isinstance(self.tickets[0].prompt, Depicted) else "generation"
        event = {"type": f"image_{task}.{kind}", "index": index, **fields}
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
