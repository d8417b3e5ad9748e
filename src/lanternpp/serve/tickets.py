"""A picture from its request to its result: its ticket, its progress, and the finished image."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import IO

from PIL import Image
from starlette.exceptions import HTTPException
from torch import Tensor

from lanternpp.api.options import Settings
from lanternpp.models.base import Target
from lanternpp.types import Prompt, shape_of

# Statuses of pictures that are not drawn.
FULL, CLOSED, EXPIRED = 429, 503, 504
CANCELLED = 499  # nginx's status for a client that disconnected; only the log and the metrics see it
Key = tuple[Settings, Hashable]
"""The settings and the shape that the pictures of a batch have in common."""


def closed(reason: str = "the server is shutting down") -> HTTPException:
    """Return the error of a picture that is not drawn because the server is shutting down."""
    return HTTPException(CLOSED, reason, {"Retry-After": "5", "Connection": "close"})


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


@dataclass(eq=False, repr=False)
class Ticket(Future[FinishedImage]):
    """A picture to draw, and the future of its result; any thread may use it.

    A ticket is settled once: with a picture, with an HTTPException whose status is one of this module's, or with the error that
    drawing it raised.
    """

    prompt: str
    seed: int
    settings: Settings  # from `Pipeline.settings`; the batch runner decides the batch size
    deadline: float | None = None  # seconds from `arrived` after which the picture fails with status EXPIRED
    client: str = ""  # clients take turns in the queue; pictures of one client start in the order of arrival
    files: tuple[IO[bytes], ...] = ()  # of the pictures to edit, which the prompt shows once it is encoded
    own_shape: bool = True  # whether an edit has the shape of its picture
    arrived: float = field(default_factory=time.monotonic)  # when its request was read

    def __post_init__(self) -> None:
        super().__init__()
        self.turn = 0  # the round of the queue in which it should start
        self.started: float | None = None  # time.monotonic() when it left the queue
        self.busy_before = 0.0  # seconds that its batch runner had computed by then
        self.encoded: Prompt | None = None  # the target's encoding of the prompt, until the prefill
        self.target: Target | None = None  # that draws the picture
        self.interval: float | None = None  # minimum seconds between two reports; None: nobody reads them
        self.progress: Progress | None = None  # the latest report
        self.reported = 0.0  # time.monotonic() of the latest report

    @property
    def key(self) -> Key:
        """The settings and shape that the pictures of its batch have in common."""
        return self.settings, shape_of(self.prompt)

    @property
    def expired(self) -> HTTPException | None:
        """The error of a picture that is past its deadline; None before."""
        if self.deadline is None or time.monotonic() - self.arrived <= self.deadline:
            return None
        # Without this header OpenAI's client would try again with the same deadline.
        headers = {"x-should-retry": "false"}
        return HTTPException(EXPIRED, f"the picture was not finished within {self.deadline:g} s", headers)

    def finished(self) -> asyncio.Future[FinishedImage]:
        """Return the result as a future of the running event loop; where that is cancelled, so is the picture."""
        future = asyncio.wrap_future(self)
        # The exception is retrieved here, since asyncio logs exceptions that no coroutine retrieves.
        future.add_done_callback(lambda future: None if future.cancelled() else future.exception())
        return future

    def settle(self, outcome: FinishedImage | Exception) -> bool:
        """Set a picture or an error as the result. Returns False if the ticket was settled before."""
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
        return self.settle(HTTPException(CANCELLED, "the picture was cancelled"))
