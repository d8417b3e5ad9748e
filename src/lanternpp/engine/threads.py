"""Fewer threads while other work wants this machine's cores.

After every operation that threads share they wait for each other. Where one of them is without a core, all stand still until
it has one again, so that two threads beside other work take longer than one.
"""

from __future__ import annotations

import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

# Of this thread: nanoseconds that it ran, and that it waited for a core.
SCHEDSTAT = Path("/proc/thread-self/schedstat")
CHECK_SECONDS = 0.03  # seconds that the thread runs between two checks
CONTENDED = 0.15  # of the time in which a thread wants to run: a share of waiting from which on the machine counts as shared
# Seconds of running without such waits before more threads are tried: at first, and at most.
RETRY_SECONDS = (0.3, 10.0)
# Checks that found such waits, each within so many seconds of the last, after which a warning says so.
PERSISTENT = (3, 2.0)


@dataclass
class ContentionState:
    """What is known of the machine, which the next drawing meets as the last one left it."""

    halvings: int = 0  # of the number of threads
    uncontended: float = 0.0  # seconds that the drawing thread has run without waits since the last change
    retry_after: float = RETRY_SECONDS[0]  # doubled where more threads were tried too early
    waits: int = 0  # checks that found such waits, one soon after the other
    last_wait: float = 0.0  # when the last of them was
    warned: bool = False


contention = ContentionState()


class AdaptiveThreads:
    """A context in which `update`, called often, halves PyTorch's threads while the calling thread waits for a core.

    Once it no longer waits they are doubled, up to as many as there were, and after the context there are as many again; the
    same thread may enter it again. Where that lasts a warning says so, once. Only where a decoder's passes are computed in C:
    their results do not depend on the number of threads, while those of PyTorch's products of many rows do. And only on
    Linux, which counts how long threads wait. Within such a context of the same thread another one does nothing.
    """

    _inside = threading.local()

    def __init__(self, decoder: nn.Module):
        native = getattr(decoder, "native", None)
        self.set = getattr(native, "use_threads", torch.set_num_threads)
        self.active = (
            native is not None and SCHEDSTAT.is_file() and not getattr(self._inside, "context", False)
        )
        self.threads = self.full = torch.get_num_threads()
        # At the last check: seconds that the thread had run, and both numbers of `SCHEDSTAT`, in seconds.
        self.checked = self.ran = self.waited = 0.0

    def __enter__(self) -> AdaptiveThreads:
        """Begin with as many threads as the last context ended with."""
        if self.active:
            self._inside.context = True
            if not self.checked:
                self._check()
            self._set()
        return self

    def __exit__(self, *_: object) -> None:
        """Back to as many threads as there were."""
        if self.active:
            self._inside.context = False
            self._use(self.full)

    def update(self) -> None:
        """Check whether the calling thread has waited, where it has run for long enough since the last check."""
        if not self.active or time.thread_time() - self.checked < CHECK_SECONDS:
            return
        ran, waited = self._check()
        contention.uncontended += ran
        if waited > CONTENDED * (ran + waited):
            if self.threads > 1:
                first, most = RETRY_SECONDS
                early = contention.uncontended < first
                contention.retry_after = min(2 * contention.retry_after, most) if early else first
                contention.halvings += 1
            contention.uncontended, now = 0.0, time.monotonic()
            contention.waits = 1 if now > contention.last_wait + PERSISTENT[1] else contention.waits + 1
            contention.last_wait = now
        elif contention.halvings and contention.uncontended > contention.retry_after:
            contention.halvings, contention.uncontended = contention.halvings - 1, 0.0
        self._set()

    def _check(self) -> tuple[float, float]:
        """Seconds that the calling thread has run since the last check, and that it waited for a core."""
        before = self.ran, self.waited
        self.checked = time.thread_time()
        self.ran, self.waited = (int(nanoseconds) / 1e9 for nanoseconds in SCHEDSTAT.read_text().split()[:2])
        return self.ran - before[0], self.waited - before[1]

    def _set(self) -> None:
        """Use as many threads as the machine has for them."""
        threads = max(1, self.full >> contention.halvings)
        self._use(threads)
        if threads < self.full and contention.waits >= PERSISTENT[0] and not contention.warned:
            contention.warned = True
            warnings.warn(
                f"other work wants this machine's cores, so {threads} of {self.full} threads draw until it ends; "
                "pictures take longer",
                stacklevel=2,
            )

    def _use(self, threads: int) -> None:
        if threads != self.threads:
            self.set(threads)
            self.threads = threads
