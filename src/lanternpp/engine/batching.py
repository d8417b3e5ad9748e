"""Continuous batching: when a sample is finished, the next request takes its slot of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lanternpp.engine.decode import Engine, FinishedSample
from lanternpp.engine.threads import AdaptiveThreads
from lanternpp.types import Prompt


class ContinuousBatch:
    """The slots of an engine. Samples enter free slots and leave between the steps.

    Each sample has a name that the caller chooses: `admit` takes the name and `collect` returns it. `run` admits the samples of
    `requests`, each a condition and a seed; their names are 0, 1, 2 ...
    """

    def __init__(self, engine: Engine, requests: Iterable[tuple[str | None, int]] = ()):
        self.engine, self._requests = engine, enumerate(requests)
        self.running: dict[int, Any] = {}  # slot -> name of its sample
        self.finished = 0  # number of finished samples
        self.counts = [0] * engine.batch  # decided codes by slot

    @property
    def decided(self) -> int:
        """Codes decided so far, of finished and running samples."""
        running = sum(self.counts[slot] for slot in self.running)
        return self.finished * self.engine.target.length + running

    @property
    def codes(self) -> dict[Any, Tensor]:
        """Copies of the codes that running samples have so far, [decided] each, by the names of the samples."""
        return {
            name: self.engine.codes[slot, : self.counts[slot]].clone() for slot, name in self.running.items()
        }

    @property
    def free(self) -> list[int]:
        """Slots without a sample."""
        return [slot for slot in range(self.engine.batch) if slot not in self.running]

    def admit(self, name: Any, condition: str | None, seed: int, prompt: Prompt | None = None) -> None:
        """Prefill a sample into the first free slot, as `Engine.admit`. After an error the slot is free as before."""
        slot = self.free[0]
        try:
            self.engine.admit(slot, condition, seed, prompt)
        except BaseException:
            self.engine.drop(slot)
            raise
        self.running[slot], self.counts[slot] = name, 1

    def drop(self, slot: int) -> None:
        """Abandon the sample in a slot, which is free from now on."""
        self.engine.drop(slot)
        del self.running[slot]

    def collect(self) -> Iterator[tuple[Any, FinishedSample]]:
        """Yield finished samples with their names; a sample's slot is free when the sample is yielded."""
        length = self.engine.target.length
        for slot in [slot for slot in sorted(self.running) if self.counts[slot] >= length]:
            sample = self.engine.collect(slot)
            self.finished += 1
            yield self.running.pop(slot), sample

    def step(self) -> None:
        """Take a step of the engine, and read the number of decided codes, the only host read of the loop."""
        self.engine.step()
        self.counts = self.engine.decided()

    def run(self) -> Iterator[tuple[int, FinishedSample] | None]:
        """Draw the requests: yield finished samples as (name, sample), and None after each admission and each step."""
        while True:
            yield from self.collect()
            while self.free:
                request = next(self._requests, None)
                if request is None:
                    break
                name, (condition, seed) = request
                self.admit(name, condition, seed)
                yield None
            if not self.running:
                return
            self.step()
            yield None


@contextmanager
def open_batch(
    engine: Engine, conditions: Sequence[str | None], seeds: Sequence[int]
) -> Iterator[ContinuousBatch]:
    """Open a batch that draws one sample per condition and seed; at the end, drop samples that are not finished.

    Raises RuntimeError where the engine is drawing already.
    """
    batch = ContinuousBatch(engine, zip(conditions, seeds, strict=True))
    try:
        engine.idle.pop()
    except IndexError:
        raise RuntimeError(
            "this engine is drawing already; make one for each thread and each generator"
        ) from None
    try:
        yield batch
    finally:
        for slot in list(batch.running):
            batch.drop(slot)
        engine.idle.append(True)


def draw_samples(
    engine: Engine,
    conditions: Sequence[str | None],
    seeds: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
    watch: Callable[[ContinuousBatch], None] | None = None,
) -> Iterator[tuple[int, FinishedSample]]:
    """Draw one sample per condition and seed, `engine.batch` at a time: yield (index in the list, sample) as they finish.

    progress is called with (decided codes, all codes) after every admission and every step, and watch with the batch. Raises
    RuntimeError where the engine is drawing already.
    """
    with open_batch(engine, conditions, seeds) as batch, AdaptiveThreads(engine.target.decoder) as threads:
        for finished in batch.run():
            threads.update()
            if finished:
                yield finished
                continue
            if progress:
                progress(batch.decided, len(conditions) * engine.target.length)
            if watch:
                watch(batch)


def generate(
    engine: Engine,
    conditions: Sequence[str | None],
    seeds: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
) -> list[FinishedSample]:
    """Draw one sample per condition and seed as `draw_samples` does; return the samples in order."""
    samples = dict(draw_samples(engine, conditions, seeds, progress))
    return [samples[i] for i in range(len(conditions))]
