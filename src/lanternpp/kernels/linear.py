"""Linear layers whose weights lie in memory once, packed as the kernels read them, in bfloat16 or in 8 bits."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Iterable, Sequence
from ctypes import CDLL
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.kernels.binding import BLOCK_N, K_ALIGN, structs
from lanternpp.nn.int8 import int8_parts
from lanternpp.types import on_host

PAGE, ROOM = 1 << 21, 1 << 24  # bytes of a large page, and of what is allocated at once
ALIGNED = 64  # tensors begin at multiples of so many bytes


class LargePages:
    """Memory for weights in pages of 2 MB, where the kernel gives them: reading weights from front to back then takes less time.

    It is freed with the last weight that lies in it.
    """

    def __init__(self) -> None:
        self.room, self.lock = torch.empty(0, dtype=torch.uint8), threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of undefined numbers."""
        nbytes = math.prod(shape) * dtype.itemsize
        size = -(-nbytes // ALIGNED) * ALIGNED
        with self.lock:
            if size > len(self.room):
                trim_heap()
                length, private = -(-max(size, ROOM) // PAGE) * PAGE, getattr(mmap, "MAP_PRIVATE", None)
                # Windows has no such flags, and Linux alone has large pages, but not every kernel of it.
                pages = mmap.mmap(-1, length, *([private | mmap.MAP_ANONYMOUS] if private else []))
                with contextlib.suppress(OSError, AttributeError):
                    pages.madvise(mmap.MADV_HUGEPAGE)
                self.room = torch.frombuffer(pages, dtype=torch.uint8)
            found, self.room = self.room[:nbytes], self.room[size:]
        return found.view(dtype).view(*shape)

    def put(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a tensor."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)


def trim_heap() -> None:
    """Give freed memory back to the system. glibc keeps tensors of up to 32 MB, so weights that are packed and freed stay in memory."""
    # Other C libraries have no such function, and Windows no such list of symbols.
    with contextlib.suppress(AttributeError, TypeError):
        CDLL(None).malloc_trim(0)


PAGES = LargePages()
Layers = Sequence[tuple[Tensor, Tensor | None]]  # weights [out, in] and biases [out]


class KernelLinear(nn.Module):
    """Linear layers with the same inputs as one, for inference, with packed weights: x [..., in] -> [..., out].

    layers: weights [out, in] in bfloat16, or with the 8 bits of their checkpoint, and biases. int8: whether they are packed in
    8 bits, with a scale per output; bits and scales of a checkpoint are taken as they are. order [packed outputs]: the row, of all
    weights one after the other, that each packed output is; -1: zeros. `struct` is the layer in C, with outputs in that order.
    """

    def __init__(self, library: CDLL, layers: Layers, int8: bool = False, order: Tensor | None = None):
        super().__init__()
        kept: list[Any] = [int8_parts(weight) if int8 else None for weight, _ in layers]
        exact = all(kept)
        rows = [pair[0] for pair in kept] if exact else [weight.detach().bfloat16() for weight, _ in layers]
        rows = [x.contiguous() for x in rows]
        assert all(type(x) is Tensor for x in rows), "a subclass has no address"
        self.out_features, self.in_features = sum(map(len, rows)), rows[0].shape[1]
        # Where each output of the layers is among the packed ones; the sort puts zeros first. None: in order.
        self.places = None if order is None else order.argsort()[-self.out_features :]
        order = torch.arange(self.out_features) if order is None else order
        blocks, width = -(-len(order) // BLOCK_N), -(-self.in_features // K_ALIGN) * K_ALIGN
        padded = F.pad(order, (0, blocks * BLOCK_N - len(order)), value=-1)

        def arranged(parts: Iterable[Tensor]) -> Tensor:
            return F.pad(torch.cat(list(parts)), (0, 1))[padded]

        together = 4 if int8 else 2
        shape = blocks, width // together, BLOCK_N, together
        self.packed = PAGES.empty(shape, torch.int8 if int8 else torch.bfloat16)
        self.scale = torch.zeros(len(padded), dtype=torch.float32) if int8 else None
        row = arranged(x.data_ptr() + torch.arange(len(x)) * x[0].nbytes for x in rows)
        given = arranged(scale.float() for _, scale in kept) if exact else None
        structs.Packing(row, given, self.packed, self.scale, blocks, self.in_features, width).run(library)
        bias = None
        if any(bias is not None for _, bias in layers):
            parts = (w.new_zeros(len(w)) if b is None else b.detach() for w, b in layers)
            bias = arranged(part.float() for part in parts)
        self.library = library
        self.struct = structs.Linear(self.packed, self.scale, bias, self.in_features, len(order))

    def unpacked(self) -> Tensor:
        """The weights in the packed order, in bfloat16."""
        rows = self.packed.transpose(1, 2).flatten(2).flatten(0, 1)[: self.struct.outputs, : self.in_features]
        if self.scale is None:
            return rows
        zero = self.library.number_of(b"weight zero")
        numbers = rows.view(torch.uint8).float() - zero if zero else rows.float()
        return (numbers * self.scale[: len(rows), None]).bfloat16()

    @property
    def weight(self) -> Tensor:
        """[out, in], unpacked each time that it is asked for."""
        return self._ordered(self.unpacked(), 0)

    @property
    def bias(self) -> Tensor | None:
        """[out]."""
        bias = self.struct.alive["bias"]
        return None if bias is None else self._ordered(bias[: self.struct.outputs].bfloat16(), 0)

    def forward(self, x: Tensor) -> Tensor:
        """The product, rounded to bfloat16."""
        if takes(x):
            return self._ordered(self.product(x), -1)
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def product(
        self, x: Tensor, dtype: torch.dtype = torch.bfloat16, branches: int = 1, guidance: float = 1.0
    ) -> Tensor:
        """x [..., D] in bfloat16, the first `in` columns are read -> [..., packed outputs] in bfloat16 or float32.

        branches 2: x [2 B, ...] is guided with this scale first -> [B, ...].
        """
        leading = x.shape[:-1] if branches == 1 else (x.shape[0] // branches, *x.shape[1:-1])
        out, floats = torch.empty(*leading, self.struct.outputs, dtype=dtype), dtype == torch.float32
        if rows := math.prod(leading):
            sizes = rows, x.shape[-1], branches, floats, guidance
            structs.LinearCall(self.struct, x, out, *sizes).run(self.library)
        return out

    def logits(self, features: Tensor, scale: float, branches: int) -> Tensor | None:
        """As `HeadLogits`."""
        return self.product(features, torch.float32, branches, scale) if takes(features) else None

    def _ordered(self, x: Tensor, dim: int) -> Tensor:
        return x if self.places is None else x.index_select(dim, self.places)


def takes(x: Tensor) -> bool:
    """Whether the kernels compute from these inputs."""
    return on_host(x) and x.dtype == torch.bfloat16


def packable(weight: Tensor) -> bool:
    """Whether a weight is one that can be packed: bfloat16 on a CPU. A subclass of Tensor, such as torchao's, has no memory of its own."""
    return type(weight.detach()) is Tensor and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
