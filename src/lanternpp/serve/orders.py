"""What a client asks for, what it hears on the way, and what it gets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor

from lanternpp.settings import Settings
from lanternpp.types import Prompt


class Full(Exception):  # noqa: N818 - what the server is, not what went wrong
    """The queue has no room. `retry_after`: whole seconds until it probably has."""

    def __init__(self, waiting: int, retry_after: int):
        super().__init__(f"{waiting} pictures are waiting already; try again in {retry_after} s")
        self.retry_after = retry_after


class Closed(Exception):  # noqa: N818
    """The server shuts down and takes nothing new."""


class Expired(Exception):  # noqa: N818
    """The picture was not finished by its deadline."""


class Cancelled(Exception):  # noqa: N818
    """Whoever ordered the picture wants it no more."""


def unlogged(answer: asyncio.Future[Any]) -> None:
    """Its error is asked for when it comes, so that asyncio logs none that nobody waited for."""
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())


@dataclass(frozen=True)
class Order:
    """One picture."""

    prompt: str
    seed: int
    settings: Settings  # as Pipeline.settings gives them; the batch size is the lane's, whatever stands here
    deadline: float | None = None  # seconds from its submission until it must be finished
    client: str = ""  # clients take turns; one client's orders go first come, first served


@dataclass(frozen=True)
class Progress:
    """What is known of a running picture after a step of its lane."""

    codes: Tensor  # [decided] int64, on the CPU
    accepted: tuple[int, ...]  # codes decided by each pass so far, the prefill first
    seconds: float  # that its lane computed since it entered


@dataclass(frozen=True)
class Drawn:
    """A finished picture."""

    image: Image.Image
    codes: Tensor  # [length] int64, on the CPU
    accepted: tuple[int, ...]  # codes decided by each pass, the prefill first
    seconds: float  # that its lane computed from its prefill to its pixels
    waited: float  # seconds in the queue
    rows: int  # of its lane
    settings: Settings  # it was drawn with; batch_size is `rows`
    tv_spent: float | None = None  # None: not measured


class Ticket:
    """The handle of an order; any thread may use it."""

    def __init__(self, order: Order, left: Callable[[], None] = lambda: None):
        """left: called, once, when the ticket is settled by whoever holds it, not by the batcher."""
        self.order = order
        self.submitted = time.monotonic()
        self.started: float | None = None  # when it left the queue
        self.encoded: Prompt | None = None  # what the target makes of the prompt, until that is in a slot
        self.wanted: float | None = None  # least seconds between two snapshots; None: nobody watches
        self._left = left
        self._future: Future[Drawn] = Future()
        self._settling = threading.RLock()
        self._news: Progress | None = None
        self._fresh = False  # whether nobody watching saw it yet
        self._told = 0.0  # when the latest news came
        self._listeners: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """Whether it is finished, one way or another."""
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """Of a finished one: why there is no picture; None: there is."""
        return self._future.exception()

    @property
    def news(self) -> Progress | None:
        """The latest that is known of it."""
        return self._news

    @property
    def age(self) -> float:
        """Seconds since it was submitted."""
        return time.monotonic() - self.submitted

    def when_done(self, call: Callable[[Ticket], None]) -> None:
        """Call with this ticket once it is finished, in the thread that finishes it."""
        self._future.add_done_callback(lambda _: call(self))

    def cancel(self) -> None:
        """Give the picture up: its slot is free within a step. Nothing happens where it is finished."""
        if self.fail(Cancelled("the picture was cancelled")):
            self._left()

    def result(self, timeout: float | None = None) -> Drawn:
        """The picture, once it is finished.

        Raises Expired, Cancelled, Closed, whatever drawing it raised, or TimeoutError after `timeout` seconds.
        """
        return self._future.result(timeout)

    async def drawn(self) -> Drawn:
        """`result` for a coroutine; being cancelled itself, it gives the picture up."""
        mine = asyncio.wrap_future(self._future)
        unlogged(mine)
        try:
            return await asyncio.shield(mine)
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def follow(self, every: float = 0.0) -> AsyncIterator[Progress]:
        """What is known of the picture, again and again until it is finished; news is skipped, never queued.

        every: least seconds between two of them. A ticket has one watcher.
        """
        loop, awake = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(awake.set)

        self._listeners.append(wake)
        self._future.add_done_callback(lambda _: wake())
        self.wanted = every
        try:
            while not self.done:
                await awake.wait()
                awake.clear()
                if self._fresh and self._news is not None and not self.done:
                    self._fresh = False
                    yield self._news
        finally:
            self._listeners.remove(wake)

    def due(self, now: float) -> bool:
        """For the batcher: whether somebody watches and is due for news."""
        return self.wanted is not None and now - self._told >= self.wanted

    def tell(self, news: Progress) -> None:
        """For the batcher: news of the picture."""
        self._told = time.monotonic()
        self._news, self._fresh = news, True
        for listener in list(self._listeners):
            listener()

    def finish(self, drawn: Drawn) -> bool:
        """For the batcher: here is the picture. False where the ticket was settled before."""
        return self._settle(lambda: self._future.set_result(drawn))

    def fail(self, error: Exception) -> bool:
        """There will be no picture. False where the ticket was settled before."""
        return self._settle(lambda: self._future.set_exception(error))

    def _settle(self, how: Callable[[], None]) -> bool:
        with self._settling:
            if self.done:
                return False
            how()
            return True
