"""A picture from its request to its result: what to draw, the handle on it, its progress, and the finished image."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from typing import IO

from PIL import Image
from torch import Tensor

from lanternpp.api.options import Settings
from lanternpp.models.base import Target
from lanternpp.types import Prompt, shape_of

CLOSED = "the server is shutting down"
Key = tuple[Settings, Hashable]
"""Settings with a batch size of 1, and the shape of the picture: what pictures of one batch share."""


class Full(Exception):  # noqa: N818 - names a state of the server, as queue.Full does
    """The queue has no room. `retry_after`: whole seconds until it probably has room again."""

    def __init__(self, waiting: int, retry_after: int):
        super().__init__(f"{waiting} pictures are waiting already; try again in {retry_after} s")
        self.retry_after = retry_after


class Closed(Exception):  # noqa: N818
    """The server is shutting down and accepts nothing new."""


class Expired(Exception):  # noqa: N818
    """The picture was not finished by its deadline."""


class Cancelled(Exception):  # noqa: N818
    """The client gave the picture up."""


@dataclass(frozen=True)
class ImageSpec:
    """One picture to draw."""

    prompt: str
    seed: int
    # as Pipeline.settings gives them; the batch runner decides the batch size
    settings: Settings
    deadline: float | None = None  # seconds from its arrival after which it has failed
    client: str = ""  # clients take turns in the queue; within one client it is first come, first served
    files: tuple[IO[bytes], ...] = ()  # of the pictures to edit, which the prompt shows once it is encoded
    own_shape: bool = True  # whether an edit has the shape of its picture
    arrived: float = field(default_factory=time.monotonic)  # when its request was read

    @property
    def key(self) -> Key:
        """What it shares with the pictures of its batch."""
        return replace(self.settings, batch_size=1), shape_of(self.prompt)


@dataclass(frozen=True)
class Progress:
    """A picture that is being drawn, after a step of its batch runner."""

    codes: Tensor  # [decided] int64, on the CPU
    accepted: tuple[int, ...]  # codes decided by each pass so far, the prefill first
    seconds: float  # computed by its batch runner since the picture entered it


@dataclass(frozen=True)
class FinishedImage(Progress):
    """A finished picture; its seconds are those from the prefill to the pixels."""

    image: Image.Image
    waited: float  # seconds in the queue
    settings: Settings  # that it was drawn with; batch_size is that of its batch runner
    tv_cost: float | None = None  # None: not measured


class Ticket(Future[FinishedImage]):
    """A submitted picture, once it is finished; any thread may use it.

    A ticket is settled once: with a picture, or with Expired, Cancelled, Closed, or whatever drawing it raised.
    """

    def __init__(self, spec: ImageSpec, on_cancel: Callable[[], None] = lambda: None):
        """on_cancel: called once when `cancel` settles the ticket."""
        super().__init__()
        self.spec = spec
        self.started: float | None = None  # time.monotonic() when it left the queue
        self.encoded: Prompt | None = None  # the target's encoding of the prompt, until it is in a slot
        self.target: Target | None = None  # that draws it
        self.interval: float | None = None  # least seconds between two reports; None: nobody follows it
        self.progress: Progress | None = None  # the latest report
        self._reported = 0.0  # time.monotonic() of that report
        self._on_cancel = on_cancel
        self._wake: Callable[..., None] = lambda: None  # resumes `follow`

    async def finished(self) -> FinishedImage:
        """`result` for a coroutine. If the coroutine is cancelled, so is the picture."""
        future = asyncio.wrap_future(self)
        # asyncio logs an error that nobody has retrieved
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await future

    async def follow(self, every: float = 0.0) -> AsyncIterator[Progress]:
        """The progress of the picture until it is settled. A slow reader misses some: only the latest is kept.

        every: least seconds between two of them. Only one coroutine at a time may follow a ticket.
        """
        loop, awake, seen = asyncio.get_running_loop(), asyncio.Event(), self.progress

        def wake(*_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(awake.set)

        self._wake, self.interval = wake, every
        self.add_done_callback(wake)
        while not self.done():
            await awake.wait()
            awake.clear()
            if self.progress is not None and self.progress is not seen and not self.done():
                seen = self.progress
                yield seen

    @property
    def expired(self) -> Expired | None:
        """The error of a picture that is past its deadline; None before."""
        limit = self.spec.deadline
        if limit is None or time.monotonic() - self.spec.arrived <= limit:
            return None
        return Expired(f"the picture was not finished within {limit:g} s")

    def due(self, now: float) -> bool:
        """For the batcher: whether somebody follows the picture and the next progress report is due."""
        return self.interval is not None and now - self._reported >= self.interval

    def report(self, progress: Progress) -> None:
        """For the batcher: report progress to whoever follows the picture."""
        self.progress, self._reported = progress, time.monotonic()
        self._wake()

    def settle(self, outcome: FinishedImage | Exception) -> bool:
        """For the batcher: end with a picture or an error. Returns False if the ticket was settled before."""
        try:
            if isinstance(outcome, Exception):
                self.set_exception(outcome)
            else:
                self.set_result(outcome)
        except InvalidStateError:
            return False
        return True

    def cancel(self) -> bool:
        """Give the picture up; its slot is free within a step. Returns False if the ticket was settled before."""
        cancelled = self.settle(Cancelled("the picture was cancelled"))
        if cancelled:
            self._on_cancel()
        return cancelled
