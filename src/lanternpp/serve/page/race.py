"""A race: the same prompt and seeds by plain decoding and by a method, watched while they run."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from PIL import Image

from lanternpp.serve.batcher import Batcher
from lanternpp.serve.orders import Drawn, Order, Progress, Ticket
from lanternpp.serve.page.dials import Wish
from lanternpp.serve.pictures import half_drawn
from lanternpp.settings import Settings
from lanternpp.targets.base import PromptWarning

EVERY = 0.3  # seconds between two frames
SHARE = 4  # a preview took a second: the next one begins this many seconds later, or more

_listening = threading.Lock()  # Python's filters of warnings are the whole process's


@dataclass(frozen=True)
class Picture:
    """One picture of a race, as far as it is."""

    seed: int
    decided: int  # codes
    accepted: tuple[int, ...]  # codes by each pass
    seconds: float  # of computing
    image: Image.Image | None  # None: nothing to be seen yet
    seen: int  # codes in the image; it may lag behind
    drawn: Drawn | None  # once it is finished


@dataclass(frozen=True)
class Side:
    """One method's pictures."""

    settings: Settings
    pictures: tuple[Picture, ...]
    length: int  # codes of a picture

    @property
    def finished(self) -> bool:
        """Whether all are drawn."""
        return all(p.drawn for p in self.pictures)

    @property
    def decided(self) -> int:
        """Codes of all its pictures."""
        return sum(p.decided for p in self.pictures)

    @property
    def passes(self) -> int:
        """Passes of all its pictures."""
        return sum(len(p.accepted) for p in self.pictures)

    @property
    def per_pass(self) -> float:
        """Codes per pass so far; 0 before the first pass."""
        return self.decided / self.passes if self.passes else 0.0

    @property
    def seconds(self) -> float:
        """Mean of its pictures: what their lanes computed from each one's first pass to its last."""
        return sum(p.seconds for p in self.pictures) / len(self.pictures)

    @property
    def rows(self) -> int:
        """Most pictures that were decided together; 0: not known yet."""
        return max((p.drawn.rows for p in self.pictures if p.drawn), default=0)

    @property
    def tv_spent(self) -> float | None:
        """Mean of its finished pictures; None: not measured."""
        spent = [p.drawn.tv_spent for p in self.pictures if p.drawn and p.drawn.tv_spent is not None]
        return sum(spent) / len(spent) if spent else None


@dataclass(frozen=True)
class Frame:
    """Both sides at one moment."""

    base: Side
    side: Side

    @property
    def finished(self) -> bool:
        """Whether both are."""
        return self.base.finished and self.side.finished

    @property
    def speedup(self) -> float:
        """Seconds of plain decoding over the method's; both must be finished."""
        return self.base.seconds / self.side.seconds


class Race:
    """Two orders per seed in a batcher. Raises what `Batcher.submit_all` raises, with nothing ordered."""

    def __init__(self, batcher: Batcher, wish: Wish, client: str = "", deadline: float | None = None):
        self.batcher, self.wish = batcher, wish
        orders = [
            Order(wish.prompt, seed, settings, deadline, client)
            for settings in (wish.base, wish.side)
            for seed in wish.seeds
        ]
        self.tickets = batcher.submit_all(orders)
        self._news: list[Progress | None] = [None] * len(orders)
        self._images: list[tuple[int, Image.Image] | None] = [None] * len(orders)
        self._next = 0.0  # when a preview may be drawn again

    def cancel(self) -> None:
        """Give up what is not finished."""
        for ticket in self.tickets:
            ticket.cancel()

    async def frames(self, every: float = EVERY) -> AsyncIterator[Frame]:
        """Both sides again and again, the last time when all is drawn.

        Raises what the first picture that fails raises; whatever ends it gives up the others.
        """
        listeners = [asyncio.ensure_future(self._listen(i, t, every)) for i, t in enumerate(self.tickets)]
        try:
            waiting: set[asyncio.Future[None]] = set(listeners)
            while waiting:
                finished, waiting = await asyncio.wait(waiting, timeout=every)
                for one in finished:
                    one.result()
                frame = await asyncio.to_thread(self.frame)
                if waiting and not frame.finished:
                    yield frame
            yield self.frame()
        finally:
            for listener in listeners:
                listener.cancel()
            self.cancel()

    async def _listen(self, index: int, ticket: Ticket, every: float) -> None:
        """Keep the latest news of a picture; raises what drawing it raised."""
        async for news in ticket.follow(every):
            self._news[index] = news
        await ticket.drawn()

    def frame(self) -> Frame:
        """Both sides now; draws previews, no more than a fraction of the time."""
        began = time.monotonic()
        if began >= self._next:
            for i, (ticket, news) in enumerate(zip(self.tickets, self._news, strict=True)):
                seen = self._images[i]
                if news is not None and not ticket.done and (seen is None or seen[0] < len(news.codes)):
                    self._images[i] = (len(news.codes), half_drawn(self.batcher.pipe, news.codes))
            self._next = time.monotonic() + SHARE * (time.monotonic() - began)
        pictures = [self._picture(i) for i in range(len(self.tickets))]
        half, length = len(pictures) // 2, self.batcher.pipe.target.length
        return Frame(
            Side(self.wish.base, tuple(pictures[:half]), length),
            Side(self.wish.side, tuple(pictures[half:]), length),
        )

    def _picture(self, index: int) -> Picture:
        ticket, news, seen = self.tickets[index], self._news[index], self._images[index]
        seed = ticket.order.seed
        if ticket.done:
            drawn = ticket.result(0)
            count = len(drawn.codes)
            return Picture(seed, count, drawn.accepted, drawn.seconds, drawn.image, count, drawn)
        if news is None:
            return Picture(seed, 0, (), 0.0, None, 0, None)
        codes, image = seen or (0, None)
        return Picture(seed, len(news.codes), news.accepted, news.seconds, image, codes, None)


def heard(batcher: Batcher, prompt: str) -> Sequence[str]:
    """What the target warns of in a prompt, such as words that it does not know. InputError if it refuses it."""
    with _listening, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PromptWarning)
        batcher.check(prompt)
    return [str(w.message) for w in caught if issubclass(w.category, PromptWarning)]
