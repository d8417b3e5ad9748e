"""The order in which clients take turns; batch runners; and the scheduler, which chooses the batch runner that a picture
enters and the batch runner that steps next.

Batch runners have 1, 2, 4 ... `slots` slots; there is at most one for each pair of settings and size. Where w pictures of
the same settings wait, the fitting size is the smallest size that is at least w (at most `slots`). A picture enters

1. the largest running batch runner of its settings that has a free slot, if it has at least the fitting size (a small one
   is not refilled while many pictures wait) and at least half of its slots would then be in use (a large one is not kept
   running for a few pictures);
2. else an idle or new batch runner of the smallest size, from the fitting size up, that is not running;
3. else none, and the picture waits. At most `max_runners` engines are kept; the idle engine that was used longest ago is
   closed to make room. While a picture waits for room, no later picture of the queue enters a batch runner, so that running
   ones become idle.

The last of the `max_runners` batch runners is not given to a client that has pictures in all others. The pictures of this
client wait, but those of other clients do not.

Every step is charged to one client, though pictures of other clients may advance in it too. The next step is given to the
client that was charged the fewest seconds, so clients get equal time, however many batch runners a client uses. Of a
client's batch runners the one that stepped longest ago steps, so that its pictures advance evenly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter

from PIL import Image
from torch import Tensor

from lanternpp.api.options import Settings
from lanternpp.engine.batching import ContinuousBatch
from lanternpp.engine.decode import Engine, FinishedSample
from lanternpp.engine.threads import AdaptiveThreads
from lanternpp.serve.tickets import FinishedImage, Key, Progress, Ticket


def with_ticket(tickets: Sequence[Ticket], new: Ticket) -> tuple[Ticket, ...]:
    """Return tickets and a new one in the order in which they should start: round robin over clients.

    The new one is put into the round after the last round in which its client has a waiting ticket, and not before the round that
    is being served. So a client with forty tickets and a client with one ticket alternate.
    """
    waiting = [ticket for ticket in tickets if ticket.started is None]
    served = min((ticket.turn for ticket in waiting), default=0)
    new.turn = max([served, *(ticket.turn + 1 for ticket in waiting if ticket.client == new.client)])
    return tuple(sorted([*tickets, new], key=lambda ticket: ticket.turn))


class BatchRunner:
    """A continuous batch of pictures with the same settings, and the time that it has computed.

    key: the settings and shape that its pictures share. settings: those of the engine, which may differ from the settings in
    `key`, because the draft is fitted to a batch size. pixels: turns codes [pictures, length] into pictures.
    """

    def __init__(
        self,
        engine: Engine,
        key: Key,
        settings: Settings,
        pixels: Callable[[Tensor], list[Image.Image]],
    ):
        self.batch = ContinuousBatch(engine)  # a sample's name: its ticket
        self.key, self.settings, self.pixels = key, settings, pixels
        self.threads = AdaptiveThreads(engine.target.decoder)
        self.busy_seconds = 0.0  # seconds of computing so far
        self.last_used = 0.0  # time.monotonic() after its latest step

    @property
    def tickets(self) -> list[Ticket]:
        """The tickets of the pictures that are being drawn. Any thread may read it."""
        return list(self.batch.running.values())

    @property
    def clients(self) -> list[str]:
        """The clients of the pictures that are being drawn, each once."""
        return list(dict.fromkeys(ticket.client for ticket in self.tickets))

    def admit(self, ticket: Ticket) -> None:
        """Prefill the prompt of a ticket. Raises InputError where the target refuses the prompt."""
        ticket.busy_before = self.busy_seconds
        with self._timed(), self.threads:
            self.batch.admit(ticket, ticket.prompt, ticket.seed, ticket.encoded)

    def step(self) -> None:
        """Run one step of the engine, settle the tickets of finished pictures, and report the progress of the others."""
        with self._timed(), self.threads:
            self.batch.step()
            self.threads.update()
        for ticket, sample in self.batch.collect():
            self._finish(ticket, sample)
        engine, now = self.batch.engine, time.monotonic()
        for slot, ticket in self.batch.running.items():
            if ticket.interval is not None and now - ticket.reported >= ticket.interval:
                codes = engine.codes[slot, : self.batch.counts[slot]].to("cpu", copy=True)
                accepted = engine.accepted[slot, : int(engine.passes[slot])].tolist()
                ticket.progress = Progress(codes, tuple(accepted), self.busy_seconds - ticket.busy_before)
                ticket.reported = now
        self.last_used = now

    def sweep(self) -> None:
        """Free the slots whose tickets are settled: cancelled, or past their deadline."""
        for slot, ticket in list(self.batch.running.items()):
            if ticket.done():
                self.batch.drop(slot)

    def _finish(self, ticket: Ticket, sample: FinishedSample) -> None:
        try:
            with self._timed():
                image = self.pixels(sample.codes[None])[0]
        except Exception as error:
            ticket.settle(error)
            raise
        ticket.settle(
            FinishedImage(
                image=image,
                codes=sample.codes.cpu(),
                accepted=tuple(sample.accepted),
                seconds=self.busy_seconds - ticket.busy_before,
                waited=(ticket.started or ticket.arrived) - ticket.arrived,
                settings=self.settings,
                tv_cost=sample.tv_cost,
            )
        )

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the seconds that the block takes to `busy_seconds`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.busy_seconds += time.perf_counter() - start


class MustWait(Exception):  # noqa: N818 - a state, not a fault
    """A picture must wait, and so must later ones of the queue: those with this key or of this client, or all (None)."""

    def __init__(self, whom: Key | str | None):
        super().__init__(whom)
        self.whom = whom


class Scheduler:
    """All batch runners, and the seconds charged to clients.

    Only one thread may change a scheduler; any thread may read `runners`.
    """

    def __init__(self, build: Callable[[Key, int], BatchRunner], slots: int, max_runners: int):
        """build: called with a key and a batch size, returns a batch runner; slots: the largest batch size."""
        self.build, self.slots, self.max_runners = build, slots, max_runners
        self.runners: tuple[BatchRunner, ...] = ()
        self._charged: dict[str, float] = {}  # client -> seconds; a new client starts at the smallest value

    @property
    def running(self) -> list[BatchRunner]:
        """The batch runners with pictures, the one that stepped longest ago first."""
        running = [runner for runner in self.runners if runner.tickets]
        return sorted(running, key=lambda runner: runner.last_used)

    @property
    def tickets(self) -> list[Ticket]:
        """The tickets in all slots."""
        return [ticket for runner in self.runners for ticket in runner.tickets]

    def count_runners(self, size: int) -> int:
        """Return the number of batch runners of this size."""
        return sum(runner.settings.batch_size == size for runner in self.runners)

    def next_step(self) -> tuple[BatchRunner, str] | None:
        """Return the batch runner that steps next, and the client to charge; None: there is no picture to draw."""
        running = self.running
        clients = list(dict.fromkeys(client for runner in running for client in runner.clients))
        if not clients:
            return None
        charged = {client: self._charged[client] for client in clients if client in self._charged}
        smallest = min(charged.values(), default=0.0)
        self._charged = {client: charged.get(client, smallest) for client in clients}
        client = min(clients, key=self._charged.__getitem__)
        return next(runner for runner in running if client in runner.clients), client

    def charge(self, client: str, seconds: float) -> None:
        """Charge a client for seconds of computing."""
        smallest = min(self._charged.values(), default=0.0)
        self._charged[client] = self._charged.get(client, smallest) + seconds

    def runner_for(self, key: Key, num_waiting: int, client: str = "") -> BatchRunner:
        """Return the batch runner that the first of `num_waiting` pictures with this key enters.

        It follows the rules 1 to 3 of this module's docstring. Raises MustWait, or whatever building an engine raises.
        """
        size = min(self.slots, 1 << (num_waiting - 1).bit_length())  # the fitting size
        runner_by_size = {runner.settings.batch_size: runner for runner in self.runners if runner.key == key}
        for runner_size, runner in sorted(runner_by_size.items(), reverse=True, key=itemgetter(0)):
            num_running = len(runner.tickets)
            is_partly_filled = 0 < num_running < runner_size
            if is_partly_filled and size <= runner_size <= 2 * (num_running + num_waiting):
                return runner
        while size in runner_by_size and runner_by_size[size].tickets:
            size *= 2
        if size > self.slots:
            raise MustWait(key)
        idle = [runner for runner in self.runners if not runner.tickets]
        if len(self.runners) >= self.max_runners and not idle:
            raise MustWait(None)
        num_client_runners = sum(client in runner.clients for runner in self.runners)
        if num_client_runners >= max(1, self.max_runners - 1):
            raise MustWait(client)
        if size in runner_by_size:
            return runner_by_size[size]
        if len(self.runners) >= self.max_runners:
            self.close(min(idle, key=lambda runner: runner.last_used))
        runner = self.build(key, size)
        self.runners = (*self.runners, runner)
        return runner

    def close(self, runner: BatchRunner) -> None:
        """Drop a batch runner, which frees the memory of its engine."""
        self.runners = tuple(candidate for candidate in self.runners if candidate is not runner)
