"""How the kernels want weights to lie in memory: in blocks of some outputs, in large pages."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lanternpp.nn.int8 import stored_parts

COLUMNS = 32  # of a block of weights, as in decoder.c
DEPTH = 64  # weights in 8 bits have a multiple of so many inputs, as in decoder.c
PAGE, ROOM = 1 << 21, 1 << 24  # bytes of a large page, and of what is allocated at once
ALIGNED = 64  # tensors begin at multiples of so many bytes


class LargePages:
    """Memory for weights in pages of 2 MB, where the kernel gives them: reading weights from front to back then takes less time."""

    def __init__(self) -> None:
        self.room, self.used = torch.empty(0, dtype=torch.uint8), 0

    def put(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a tensor."""
        size = -(-tensor.nbytes // ALIGNED) * ALIGNED
        if self.used + size > len(self.room):
            pages = allocate(-(-max(size, ROOM) // PAGE) * PAGE)
            self.room, self.used = torch.frombuffer(pages, dtype=torch.uint8), 0
        place = self.room[self.used :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.used += size
        return place.copy_(tensor)


def allocate(size: int) -> mmap.mmap:
    """Memory of this process, in large pages where there are such."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Linux alone has them, and not every kernel of it.
    with contextlib.suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def blocks(
    weight: Tensor, bias: Tensor | None, multiple: int, order: Callable[[Tensor], Tensor] = lambda x: x
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Weight [out, in] -> [out / COLUMNS, in / n, COLUMNS, n], and a scale, if it has 8 bits, and bias; n is 2, or 4 in 8 bits.

    Outputs are in the `order` of a function of [out, m], with zeros up to a multiple.
    """

    def ordered(x: Tensor) -> Tensor:
        return pad(order(x.detach()), multiple)

    whole, together = stored_parts(weight), 2
    if whole:
        weight, together = nn.functional.pad(whole[0], (0, -whole[0].shape[1] % DEPTH)), 4
    arranged = ordered(weight).unflatten(1, (-1, together)).unflatten(0, (-1, COLUMNS)).transpose(1, 2)
    scale = None if whole is None else ordered(whole[1][:, None].float())
    return arranged, scale, None if bias is None else ordered(bias[:, None].float())


def gate_up(x: Tensor) -> Tensor:
    """x [2 n, m], a half for the gate and one for what it lets through -> the halves alternate by half blocks, padded."""
    half = COLUMNS // 2
    return torch.cat([pad(part, half).unflatten(0, (-1, half)) for part in x.chunk(2)], 1).flatten(0, 1)


def pad(x: Tensor, multiple: int) -> Tensor:
    """x [n, m] with rows of zeros up to a multiple."""
    return nn.functional.pad(x, (0, 0, 0, -len(x) % multiple))
