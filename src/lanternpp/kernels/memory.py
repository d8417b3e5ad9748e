"""Memory of kernels: weights in large pages, and scratch memory."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
import threading

import torch
from torch import Tensor

PAGE, ROOM = 1 << 21, 1 << 24  # bytes of a large page, and of what is allocated at once
ALIGNED = 64  # tensors begin at multiples of so many bytes


class LargePages:
    """Memory for weights in pages of 2 MB, where the kernel gives them: reading weights from front to back then takes less time."""

    def __init__(self) -> None:
        self.room, self.used, self.lock = torch.empty(0, dtype=torch.uint8), 0, threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of undefined numbers."""
        nbytes = math.prod(shape) * dtype.itemsize
        size = -(-nbytes // ALIGNED) * ALIGNED
        with self.lock:
            if self.used + size > len(self.room):
                pages = allocate(-(-max(size, ROOM) // PAGE) * PAGE)
                self.room, self.used = torch.frombuffer(pages, dtype=torch.uint8), 0
            place = self.room[self.used :][:nbytes].view(dtype).view(shape)
            self.used += size
        return place

    def put(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a tensor."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def allocate(size: int) -> mmap.mmap:
    """Memory of this process, in large pages where there are such."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Linux alone has them, and not every kernel of it.
    with contextlib.suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


PAGES = LargePages()
"""Of all weights of this process; memory is freed with the last weight that lies in it."""

_own = threading.local()


def scratch(size: int) -> Tensor:
    """At least so many bytes for one call of C: those of the calling thread, which its next call gets again."""
    kept: Tensor | None = getattr(_own, "scratch", None)
    if kept is None or len(kept) < size:
        kept = _own.scratch = torch.empty(size, dtype=torch.uint8)
    return kept
