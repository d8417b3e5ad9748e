"""The queue, in which clients take turns; batch runners; and the scheduler: which of them a picture enters, and which steps next.

Batch runners have 1, 2, 4 ... `slots` slots; there is at most one for each pair of settings and size. Where w pictures of
the same settings wait, the fitting size is the smallest one that is at least w (at most `slots`). A picture enters

1. the largest running batch runner of its settings that has a free slot, if it is of the fitting size or larger (a small
   one is not refilled while many pictures wait) and at least half of its slots would then be in use (a large one is not
   kept running for a few pictures);
2. else an idle or new batch runner of the smallest size, from the fitting one up, that is not running;
3. else none yet: it waits. At most `max_runners` engines are kept; the idle one that was used longest ago is closed to
   make room. While a picture waits for such room, no picture after it in the queue enters anything, so that the running
   ones empty.

The last of the `max_runners` batch runners is not given to a client that has pictures in all others. Its pictures wait,
but those of other clients do not.

Steps are shared out by client. A step is one client's: its seconds are charged to that client, though pictures of others
may advance in it too. The next step is given to the client that was charged the fewest seconds, so clients with pictures
get equal time, however many batch runners one of them uses. Of a client's batch runners the one with the smallest virtual
time (seconds per picture) steps, so that all of its pictures advance evenly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter

from PIL import Image
from torch import Tensor

from lanternpp.api.options import Settings
from lanternpp.engine.batching import ContinuousBatch
from lanternpp.engine.decode import Engine, FinishedSample
from lanternpp.engine.threads import AdaptiveThreads
from lanternpp.serve.tickets import FinishedImage, Key, Progress, Ticket


class FairQueue:
    """Waiting tickets in the order in which they should start: round robin over clients.

    A new ticket is put into a round: the one after the last round in which its client has a ticket here, and not before
    the round that is being served. So a client with forty tickets and a client with one alternate.
    """

    def __init__(self) -> None:
        # (round, ticket), sorted by round and within it by arrival. The list is replaced and never changed in place, so that
        # one thread may iterate over it while another one adds a ticket.
        self._entries: list[tuple[int, Ticket]] = []
        self._round = 0

    def __len__(self) -> int:
        """The pictures that wait; one whose prefill has begun is here until it has its slot, but waits no longer."""
        return sum(ticket.started is None for _, ticket in self._entries)

    def __iter__(self) -> Iterator[Ticket]:
        """The tickets in the order in which they should start, as of now: later changes are not seen."""
        return iter([ticket for _, ticket in self._entries])

    def add(self, ticket: Ticket) -> None:
        """Put a ticket into the queue."""
        client = ticket.spec.client
        taken = [number for number, other in self._entries if other.spec.client == client]
        number = max(self._round, max(taken, default=-1) + 1)
        self._entries = sorted([*self._entries, (number, ticket)], key=itemgetter(0))

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out, because its picture starts or because it was cancelled."""
        removed = next(number for number, entry in self._entries if entry is ticket)
        self._entries = [entry for entry in self._entries if entry[1] is not ticket]
        self._round = max(self._round, min((number for number, _ in self._entries), default=removed))


class BatchRunner:
    """A continuous batch of pictures with the same settings, and the time that it has computed.

    key: what the requests share. settings: those of the engine, which may differ from those of the requests, because the
    draft is fitted to a batch size. pixels: turns codes [pictures, length] into pictures.
    """

    def __init__(
        self,
        engine: Engine,
        key: Key,
        settings: Settings,
        pixels: Callable[[Tensor], list[Image.Image]],
    ):
        self.batch, self.key, self.settings, self.pixels = ContinuousBatch(engine), key, settings, pixels
        self.threads = AdaptiveThreads(engine.target.decoder)
        self.busy_seconds = 0.0  # computed so far
        self.virtual_time = 0.0  # those seconds, each divided by the number of pictures in it at the time
        self.last_used = 0.0  # time.monotonic() after its latest step

    @property
    def tickets(self) -> list[Ticket]:
        """The tickets of the pictures that are being drawn. Any thread may read it."""
        return [ticket for ticket, _ in list(self.batch.running.values())]

    @property
    def clients(self) -> list[str]:
        """The clients of those pictures, each once."""
        return list(dict.fromkeys(ticket.spec.client for ticket in self.tickets))

    def admit(self, ticket: Ticket) -> None:
        """Prefill the prompt of a ticket. Raises InputError where the target refuses the prompt."""
        name = ticket, self.busy_seconds
        with self._timed(), self.threads:
            self.batch.admit(name, ticket.spec.prompt, ticket.spec.seed, ticket.encoded)

    def step(self) -> int:
        """Run one step of the engine, and settle the tickets of finished pictures; returns their number."""
        with self._timed(), self.threads:
            self.batch.step()
            self.threads.update()
        before = self.batch.finished
        for (ticket, entered), sample in self.batch.collect():
            self._finish(ticket, entered, sample)
        now, engine = time.monotonic(), self.batch.engine
        for slot, (ticket, entered) in self.batch.running.items():
            if ticket.due(now):
                codes = engine.codes[slot, : self.batch.counts[slot]].to("cpu", copy=True)
                accepted = engine.accepted[slot, : int(engine.passes[slot])].tolist()
                ticket.report(Progress(codes, tuple(accepted), self.busy_seconds - entered))
        return self.batch.finished - before

    def sweep(self) -> None:
        """Free the slots whose tickets are settled: cancelled, or past their deadline."""
        for slot, (ticket, _) in list(self.batch.running.items()):
            if ticket.done():
                self.batch.drop(slot)

    def _finish(self, ticket: Ticket, entered: float, sample: FinishedSample) -> None:
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
                seconds=self.busy_seconds - entered,
                waited=(ticket.started or ticket.spec.arrived) - ticket.spec.arrived,
                settings=self.settings,
                tv_cost=sample.tv_cost,
            )
        )

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the seconds that the block takes to the counters."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self.busy_seconds += seconds
            self.virtual_time += seconds / max(1, len(self.batch.running))


class AllRunnersBusy(Exception):  # noqa: N818 - a state, not a fault
    """The picture must wait until one of the batch runners is idle."""


class ClientAtLimit(AllRunnersBusy):
    """The picture must wait until its client uses fewer batch runners."""


class Scheduler:
    """All batch runners, and the seconds charged to clients.

    One thread alone may change it; `runners` may be read by any.
    """

    def __init__(self, build: Callable[[Key, int], BatchRunner], slots: int, max_runners: int):
        """build: makes a batch runner for such pictures of this batch size; slots: the largest batch size."""
        self.build, self.slots, self.max_runners = build, slots, max_runners
        self.runners: tuple[BatchRunner, ...] = ()
        self._charged: dict[str, float] = {}  # seconds by client; a new client starts at the least of them

    @property
    def running(self) -> list[BatchRunner]:
        """The batch runners with pictures, the smallest virtual time first."""
        running = [runner for runner in self.runners if runner.tickets]
        return sorted(running, key=lambda runner: runner.virtual_time)

    @property
    def tickets(self) -> list[Ticket]:
        """The tickets in all slots."""
        return [ticket for runner in self.runners for ticket in runner.tickets]

    def next_step(self) -> tuple[BatchRunner, str] | None:
        """The batch runner that steps next, and the client to charge for it; None: there is no picture to draw."""
        running = self.running
        clients = list(dict.fromkeys(client for runner in running for client in runner.clients))
        if not clients:
            return None
        known = {client: self._charged[client] for client in clients if client in self._charged}
        least = min(known.values(), default=0.0)
        self._charged = {client: known.get(client, least) for client in clients}
        client = min(clients, key=self._charged.__getitem__)
        return next(runner for runner in running if client in runner.clients), client

    def charge(self, client: str, seconds: float) -> None:
        """Charge a client for seconds of computing."""
        least = min(self._charged.values(), default=0.0)
        self._charged[client] = self._charged.get(client, least) + seconds

    def runner_for(self, key: Key, waiting: int, client: str = "") -> BatchRunner | None:
        """The batch runner that the first of `waiting` pictures of these settings enters; None: all that fit are full.

        Raises ClientAtLimit, AllRunnersBusy, or whatever building an engine raises.
        """
        runner = self._find(key, waiting, client)
        if runner is not None and not runner.tickets and (running := self.running):
            # The time in which it was idle gives it no precedence now.
            runner.virtual_time = max(runner.virtual_time, running[0].virtual_time)
        return runner

    def _find(self, key: Key, waiting: int, client: str) -> BatchRunner | None:
        size = min(self.slots, 1 << (waiting - 1).bit_length())
        by_size = {runner.settings.batch_size: runner for runner in self.runners if runner.key == key}
        for slots in sorted(by_size, reverse=True):
            runner, filled = by_size[slots], len(by_size[slots].tickets)
            if slots >= size and 0 < filled < slots <= 2 * (filled + waiting):
                return runner
        while size <= self.slots:
            if size not in by_size or not by_size[size].tickets:
                idle = [runner for runner in self.runners if not runner.tickets]
                if len(self.runners) >= self.max_runners and not idle:
                    raise AllRunnersBusy
                if sum(client in runner.clients for runner in self.runners) >= max(1, self.max_runners - 1):
                    raise ClientAtLimit
                return by_size[size] if size in by_size else self._open(key, size, idle)
            size *= 2
        return None

    def _open(self, key: Key, size: int, idle: list[BatchRunner]) -> BatchRunner:
        """A new batch runner; where there are `max_runners` already, the idle one used longest ago is closed."""
        if len(self.runners) >= self.max_runners:
            self.close(min(idle, key=lambda runner: runner.last_used))
        runner = self.build(key, size)
        self.runners = (*self.runners, runner)
        return runner

    def close(self, runner: BatchRunner) -> None:
        """Forget a batch runner, which frees the memory of its engine."""
        self.runners = tuple(other for other in self.runners if other is not runner)
