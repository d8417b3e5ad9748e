"""Continuous batching: when a sample is finished, the next request takes its slot of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from lanternpp.engine.decode import Engine, FinishedSample
from lanternpp.nn.backend import Threads, backend


class ContinuousBatch:
    """An engine and a queue of requests, each a condition and a seed, that fill its slots."""

    def __init__(self, engine: Engine, requests: Iterable[tuple[str | None, int]]):
        self.engine, self._requests = engine, enumerate(requests)
        self.running: dict[int, int] = {}  # slot -> index of its request
        self.finished = 0  # samples
        self.counts = engine.decided()

    @property
    def decided(self) -> int:
        """Codes decided so far, of finished and running samples."""
        running = sum(self.counts[slot] for slot in self.running)
        return self.finished * self.engine.target.length + running

    @property
    def codes(self) -> dict[int, Tensor]:
        """Copies of the codes that running samples have so far, [decided] each, by the index of their request."""
        return {
            index: self.engine.codes[slot, : self.counts[slot]].clone()
            for slot, index in self.running.items()
        }

    def refill(self) -> Iterator[tuple[int, FinishedSample] | None]:
        """Collect finished samples, as (index of its request, sample), and admit the next requests, slot by slot.

        Yields None after each admission.
        """
        for slot in [slot for slot, count in enumerate(self.counts) if count >= self.engine.target.length]:
            if slot in self.running:
                index = self.running.pop(slot)
                self.finished += 1
                yield index, self.engine.collect(slot)
            following = next(self._requests, None)
            if following is not None:
                self.running[slot], (condition, seed) = following
                self.engine.admit(slot, condition, seed)
                self.counts[slot] = 1
                yield None

    def step(self) -> None:
        """One step of the engine, and the one host read of the loop."""
        self.engine.step()
        self.counts = self.engine.decided()

    def run(self) -> Iterator[tuple[int, FinishedSample] | None]:
        """Every sample as `refill` gives it, until all are finished; None after each admission and each step."""
        while True:
            yield from self.refill()
            if not self.running:
                return
            self.step()
            yield None


@contextmanager
def opened(
    engine: Engine, conditions: Sequence[str | None], seeds: Sequence[int]
) -> Iterator[ContinuousBatch]:
    """A batch that draws one sample per condition and seed; in the end, samples that are not finished are dropped.

    Raises RuntimeError where the engine is drawing already.
    """
    if engine.drawing:
        raise RuntimeError("this engine is drawing already; make one for each thread and each generator")
    batch = ContinuousBatch(engine, zip(conditions, seeds, strict=True))
    engine.drawing = True
    try:
        yield batch
    finally:
        engine.drawing = False
        for slot in batch.running:
            engine.drop(slot)


def adaptive_threads(engine: Engine) -> Threads:
    """A context in which an engine's steps give up threads while other work wants the cores."""
    return backend().threads(engine.target.decoder)


def drawing(
    engine: Engine,
    conditions: Sequence[str | None],
    seeds: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[int, FinishedSample]]:
    """Draw one sample per condition and seed, `engine.batch` at a time: (place in the list, sample), as they finish.

    progress is called with (decided codes, all codes) after every admission and every step. Raises RuntimeError where the
    engine is drawing already.
    """
    with opened(engine, conditions, seeds) as batch, adaptive_threads(engine) as threads:
        for sample in batch.run():
            threads.update()
            if sample:
                yield sample
            elif progress:
                progress(batch.decided, len(conditions) * engine.target.length)


def generate(
    engine: Engine,
    conditions: Sequence[str | None],
    seeds: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
) -> list[FinishedSample]:
    """Draw one sample per condition and seed, in order; as `drawing`."""
    drawn = dict(drawing(engine, conditions, seeds, progress))
    return [drawn[i] for i in range(len(conditions))]
