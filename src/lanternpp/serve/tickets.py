"""A picture from its request to its result: its specification, its ticket, its progress, and the finished image."""

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
"""Settings with a batch size of 1, and the shape of the picture; the pictures of a batch have both in common."""


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
    """The client abandoned the picture."""


@dataclass(frozen=True)
class ImageSpec:
    """One picture to draw."""

    prompt: str
    seed: int
    settings: Settings  # from `Pipeline.settings`; the batch runner decides the batch size
    deadline: float | None = None  # seconds from `arrived` after which the picture fails with Expired
    client: str = ""  # clients take turns in the queue; pictures of one client start in the order of arrival
    files: tuple[IO[bytes], ...] = ()  # of the pictures to edit, which the prompt shows once it is encoded
    own_shape: bool = True  # whether an edit has the shape of its picture
    arrived: float = field(default_factory=time.monotonic)  # when its request was read

    @property
    def key(self) -> Key:
        """The settings and shape that the pictures of its batch have in common."""
        return replace(self.settings, batch_size=1), shape_of(self.prompt)


@dataclass(frozen=True)
class Progress:
    """A picture that is being drawn, after a step of its batch runner."""

    codes: Tensor  # [decided] int64, on the CPU
    accepted: tuple[int, ...]  # codes decided by each pass so far, the prefill first
    seconds: float  # computed by its batch runner since the picture entered it


@dataclass(frozen=True)
class FinishedImage(Progress):
    """A finished picture. `seconds` are those that its batch runner computed from the prefill to the pixels."""

    image: Image.Image
    waited: float  # seconds in the queue
    settings: Settings  # of the engine that drew it, with the batch size of its batch runner
    tv_cost: float | None = None  # None: not measured


class Ticket(Future[FinishedImage]):
    """A future of a submitted picture; any thread may use it.

    A ticket is settled once: with a picture, or with Expired, Cancelled, Closed, or the error that drawing it raised.
    """

    def __init__(self, spec: ImageSpec, on_cancel: Callable[[], None] = lambda: None):
        """on_cancel: called once when `cancel` settles the ticket."""
        super().__init__()
        self.spec = spec
        self.started: float | None = None  # time.monotonic() when it left the queue
        self.encoded: Prompt | None = None  # the target's encoding of the prompt, until the prefill
        self.target: Target | None = None  # that draws the picture
        self.interval: float | None = None  # minimum seconds between two reports; None: no coroutine follows
        self.progress: Progress | None = None  # the latest report
        self._reported = 0.0  # time.monotonic() of the latest report
        self._on_cancel = on_cancel
        self._wake: Callable[..., None] = lambda: None  # resumes `follow`

    async def finished(self) -> FinishedImage:
        """Wait for the picture in a coroutine, and return it. If the coroutine is cancelled, so is the picture."""
        future = asyncio.wrap_future(self)
        # The exception is retrieved here, since asyncio logs exceptions that no coroutine retrieves.
        future.add_done_callback(lambda future: None if future.cancelled() else future.exception())
        return await future

    async def follow(self, interval: float = 0.0) -> AsyncIterator[Progress]:
        """Yield the progress of the picture until it is settled. A slow reader gets the latest report alone.

        interval: minimum seconds between two reports. Only one coroutine at a time may follow a ticket.
        """
        loop, awake = asyncio.get_running_loop(), asyncio.Event()
        latest = self.progress

        def wake(*_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(awake.set)

        self._wake, self.interval = wake, interval
        self.add_done_callback(wake)
        while not self.done():
            await awake.wait()
            awake.clear()
            if self.progress is not None and self.progress is not latest and not self.done():
                latest = self.progress
                yield latest

    @property
    def expired(self) -> Expired | None:
        """The error of a picture that is past its deadline; None before."""
        limit = self.spec.deadline
        if limit is None or time.monotonic() - self.spec.arrived <= limit:
            return None
        return Expired(f"the picture was not finished within {limit:g} s")

    @property
    def due(self) -> bool:
        """For the batcher: whether a coroutine follows the picture and the next report is due."""
        return self.interval is not None and time.monotonic() - self._reported >= self.interval

    def report(self, progress: Progress) -> None:
        """For the batcher: report progress to the coroutine that follows the picture."""
        self.progress, self._reported = progress, time.monotonic()
        self._wake()

    def settle(self, outcome: FinishedImage | Exception) -> bool:
        """For the batcher: set a picture or an error as the result. Returns False if the ticket was settled before."""
        try:
            if isinstance(outcome, Exception):
                self.set_exception(outcome)
            else:
                self.set_result(outcome)
        except InvalidStateError:
            return False
        return True

    def cancel(self) -> bool:
        """Cancel the picture; its slot is free within a step. Returns False if the ticket was settled before."""
        cancelled = self.settle(Cancelled("the picture was cancelled"))
        if cancelled:
            self._on_cancel()
        return cancelled
