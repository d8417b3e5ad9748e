"""No more threads than cores, and fewer while other work wants them.

Threads that share an operation wait for each other at its end. While one thread has no core, all of them stand still, so that
two threads beside other work take longer than one thread.
"""

from __future__ import annotations

import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lanternpp.util.devices import usable_cores

# Nanoseconds that the calling thread ran, and that it waited for a core.
SCHEDSTAT = Path("/proc/thread-self/schedstat")
CHECK_SECONDS = 0.03  # seconds that the thread runs between two checks
CONTENDED = 0.15  # a check finds contention if the thread waited for more than this share of the time that it ran or waited
MIN_RETRY, MAX_RETRY = 0.3, 10.0  # seconds of running without contention before more threads are tried
# A warning follows this number of checks with contention, at most so many seconds apart.
MIN_CONTENDED_CHECKS, MAX_GAP = 3, 2.0


@dataclass
class ContentionState:
    """The contention of this machine, which outlasts a drawing."""

    halvings: int = 0  # of the number of threads
    uncontended: float = 0.0  # seconds that the thread has run without contention since the last change
    retry_after: float = MIN_RETRY  # doubled where more threads were tried too early
    contended_checks: int = 0  # checks that found contention, at most `MAX_GAP` seconds apart
    last_contended: float = 0.0  # time of the last of these checks
    warned: bool = False


contention = ContentionState()


class AdaptiveThreads:
    """A context with no more threads than cores; `update`, called often, halves them while the calling thread waits for a core.

    Once the thread no longer waits, the number of threads is doubled again. The end of the context restores PyTorch's
    number; the same thread may enter the context again. A warning tells of lasting contention, once. The context is active
    only where a decoder's passes are computed in C, whose results do not depend on the number of threads, as the results of
    PyTorch's products of many rows do; only on Linux, which counts how long threads wait; and not within an active context.
    """

    _inside = threading.local()

    def __init__(self, decoder: nn.Module):
        native = getattr(decoder, "native", None)
        self.set = getattr(native, "use_threads", torch.set_num_threads)
        nested = getattr(self._inside, "context", False)
        self.active = native is not None and SCHEDSTAT.is_file() and not nested
        self.threads = self.original = torch.get_num_threads()
        self.max_threads = min(self.original, usable_cores())
        # At the last check: the thread's time, and its times of `SCHEDSTAT`, in seconds.
        self.last_check = self.run_time = self.wait_time = 0.0

    def __enter__(self) -> AdaptiveThreads:
        """Use the number of threads that the last context ended with."""
        if self.active:
            self._inside.context = True
            if not self.last_check:
                self._check()
            self._set()
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the original number of threads."""
        if self.active:
            self._inside.context = False
            self._use(self.original)

    def update(self) -> None:
        """Check whether the calling thread waited for a core, once it has run for `CHECK_SECONDS` since the last check."""
        if not self.active or time.thread_time() - self.last_check < CHECK_SECONDS:
            return
        ran, waited = self._check()
        contention.uncontended += ran
        if waited > CONTENDED * (ran + waited):
            if self.threads > 1:
                early = contention.uncontended < MIN_RETRY
                contention.retry_after = min(2 * contention.retry_after, MAX_RETRY) if early else MIN_RETRY
                contention.halvings += 1
            contention.uncontended = 0.0
            now = time.monotonic()
            if now > contention.last_contended + MAX_GAP:
                contention.contended_checks = 0
            contention.contended_checks += 1
            contention.last_contended = now
        elif contention.halvings and contention.uncontended > contention.retry_after:
            contention.halvings -= 1
            contention.uncontended = 0.0
        self._set()

    def _check(self) -> tuple[float, float]:
        """Return the seconds that the calling thread has run and has waited for a core since the last check."""
        run_time, wait_time = self.run_time, self.wait_time
        self.last_check = time.thread_time()
        self.run_time, self.wait_time = (int(number) / 1e9 for number in SCHEDSTAT.read_text().split()[:2])
        return self.run_time - run_time, self.wait_time - wait_time

    def _set(self) -> None:
        """Halve the largest number of threads `halvings` times, and warn of lasting contention."""
        threads = max(1, self.max_threads >> contention.halvings)
        self._use(threads)
        lasting = contention.contended_checks >= MIN_CONTENDED_CHECKS
        if threads < self.max_threads and lasting and not contention.warned:
            contention.warned = True
            warnings.warn(
                f"other work wants this machine's cores, so {threads} of {self.max_threads} threads draw until it ends; "
                "pictures take longer",
                stacklevel=2,
            )

    def _use(self, threads: int) -> None:
        if threads != self.threads:
            self.set(threads)
            self.threads = threads
