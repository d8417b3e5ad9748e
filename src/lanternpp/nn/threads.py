"""Fewer threads while other work wants this machine's cores.

After every operation that threads share they wait for each other. Where one of them is without a core, all stand still until
it has one again, so that two threads beside other work take longer than one.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import torch

from lanternpp.nn.decoder import Decoder

WAITS = Path(
    "/proc/thread-self/schedstat"
)  # of this thread: nanoseconds that it ran, and that it waited for a core
INTERVAL = 0.05  # seconds between two looks at it
SHARED = 0.15  # of the time in which a thread wants to run: a share of waiting from which on the machine counts as shared
ALONE = 1.0  # seconds of running without such waits, after which more threads are tried again


class FittedThreads:
    """A context in which `update`, called often, halves PyTorch's threads while the calling thread waits for a core.

    Once it no longer does they are doubled, up to as many as there were; these there are again behind the context. A warning
    says so the first time. Only where a decoder's passes are computed in C, whose results, like those of the small
    operations around them, do not depend on the number of threads; and only on Linux, which counts how long threads wait.
    """

    halvings = 0  # found by the last of these contexts, as the next drawing meets the same machine
    warned = False

    def __init__(self, decoder: Decoder):
        self.active = decoder.native is not None and WAITS.is_file()
        self.threads = self.every = torch.get_num_threads()
        self.looked, self.ran, self.waited, self.alone = 0.0, 0, 0, 0.0

    def __enter__(self) -> FittedThreads:
        """Begin with as many threads as the last context ended with."""
        if self.active:
            self._look()
            self._set()
        return self

    def __exit__(self, *_: object) -> None:
        """Back to as many threads as there were."""
        if self.threads != self.every:
            torch.set_num_threads(self.every)

    def update(self) -> None:
        """Look whether the calling thread has waited, where the last look is long enough ago."""
        if not self.active or time.perf_counter() - self.looked < INTERVAL:
            return
        ran, waited = self._look()
        self.alone += ran
        if waited > SHARED * (ran + waited):
            self.alone = 0.0
            if self.threads > 1:
                FittedThreads.halvings += 1
                self._set()
        elif FittedThreads.halvings and self.alone > ALONE:
            self.alone = 0.0
            FittedThreads.halvings -= 1
            self._set()

    def _look(self) -> tuple[float, float]:
        """Seconds that the calling thread has run since the last look, and that it waited for a core."""
        before = self.ran, self.waited
        self.looked = time.perf_counter()
        self.ran, self.waited = map(int, WAITS.read_text().split()[:2])
        return (self.ran - before[0]) / 1e9, (self.waited - before[1]) / 1e9

    def _set(self) -> None:
        threads = max(1, self.every >> FittedThreads.halvings)
        if threads == self.threads:
            return
        torch.set_num_threads(threads)
        self.threads = threads
        if threads < self.every and not FittedThreads.warned:
            FittedThreads.warned = True
            warnings.warn(
                f"other work wants this machine's cores, so {threads} of {self.every} threads draw until it ends; "
                "pictures take longer",
                stacklevel=2,
            )
