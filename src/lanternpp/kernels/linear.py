"""Linear layers whose weights lie in memory once, packed as the kernels read them, in bfloat16, 8 or 4 bits."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Iterable, Sequence
from ctypes import CDLL
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.kernels.binding import BLOCK_N, FACTOR_ZERO, K_ALIGN, structs
from lanternpp.nn.int8 import int8_parts
from lanternpp.types import on_host

PAGE_BYTES, CHUNK_BYTES = 1 << 21, 1 << 24  # of a large page; the least that is allocated at once
ALIGNMENT = 64  # bytes: tensors begin at multiples of this
# The rest of the last pages that were allocated.
chunk = SimpleNamespace(free=torch.empty(0, dtype=torch.uint8), lock=threading.Lock())


def empty_in_large_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of undefined numbers in pages of 2 MB, where the system has them: it is then read in less time.

    A chunk of pages is freed with the last tensor that lies in it.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    aligned_nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
    with chunk.lock:
        if aligned_nbytes > len(chunk.free):
            # glibc keeps freed tensors of up to 32 MB, and so weights that were packed, until it is told to trim its heap.
            # Other C libraries have no such function, and Windows no such list of symbols.
            with contextlib.suppress(AttributeError, TypeError):
                CDLL(None).malloc_trim(0)
            length = -(-max(aligned_nbytes, CHUNK_BYTES) // PAGE_BYTES) * PAGE_BYTES
            # Windows has no such flags; large pages are of Linux alone, and not of every kernel of Linux.
            flags = [mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS] if hasattr(mmap, "MAP_PRIVATE") else []
            pages = mmap.mmap(-1, length, *flags)
            with contextlib.suppress(OSError, AttributeError):
                pages.madvise(mmap.MADV_HUGEPAGE)
            chunk.free = torch.frombuffer(pages, dtype=torch.uint8)
        memory, chunk.free = chunk.free[:nbytes], chunk.free[aligned_nbytes:]
    return memory.view(dtype).view(*shape)


Layers = Sequence[tuple[Tensor, Tensor | None]]  # weights [out, in] and biases [out]


class KernelLinear(nn.Module):
    """Linear layers with the same inputs as one, for inference, with packed weights: x [..., in] -> [..., out].

    layers: weights [out, in] in bfloat16, or with the 8 bits of their checkpoint, and biases. dtype: of the packed weights,
    "bfloat16", "int8", where 8 bits and scales of a checkpoint are taken as they are, or "int4". order [packed outputs]: the row of
    each packed output in the concatenated weights; -1: zeros. `struct` is the layer in C, with outputs in this order.
    """

    def __init__(self, library: CDLL, layers: Layers, dtype: str = "bfloat16", order: Tensor | None = None):
        super().__init__()
        is_half, is_int4 = dtype == "bfloat16", dtype == "int4"
        pairs: list[Any] = [
            None if is_half else int8_parts(weight) for weight, _ in layers
        ]  # 8 bits and scales
        if all(pairs):
            weights = [bits.contiguous() for bits, _ in pairs]
        else:
            weights = [weight.detach().bfloat16().contiguous() for weight, _ in layers]
        assert all(type(weight) is Tensor for weight in weights), "a subclass has no address"
        self.out_features, self.in_features = sum(map(len, weights)), weights[0].shape[1]
        # The packed output of each output of the layers; the sort puts zeros first. None: the same order.
        self.packed_outputs = None if order is None else order.argsort()[-self.out_features :]
        order = torch.arange(self.out_features) if order is None else order
        blocks, width = -(-len(order) // BLOCK_N), -(-self.in_features // K_ALIGN) * K_ALIGN
        padded_order = F.pad(order, (0, blocks * BLOCK_N - len(order)), value=-1)

        def arranged(parts: Iterable[Tensor]) -> Tensor:
            return F.pad(torch.cat(list(parts)), (0, 1))[padded_order]  # the last number, at -1, is 0

        shapes: dict[str, tuple[int, ...]] = {
            "bfloat16": (width // 2, BLOCK_N, 2),  # 2 or 4 inputs of one output lie side by side
            "int8": (width // 4, BLOCK_N, 4),
            "int4": (width * (1 + BLOCK_N // 2),),
        }
        number_type = torch.bfloat16 if is_half else torch.uint8
        self.packed = empty_in_large_pages((blocks, *shapes[dtype]), number_type)
        self.scale = None if is_half else torch.zeros(len(padded_order), dtype=torch.float32)
        addresses = arranged(w.data_ptr() + torch.arange(len(w)) * w[0].nbytes for w in weights)
        scales = arranged(scale.float() for _, scale in pairs) if all(pairs) else None
        packing = structs.Packing(addresses, scales, self.packed, self.scale, blocks, self.in_features, width)
        packing.is_int4 = is_int4
        packing.run(library)
        packed_bias = None
        if any(bias is not None for _, bias in layers):
            biases = (w.new_zeros(len(w)) if bias is None else bias.detach() for w, bias in layers)
            packed_bias = arranged(bias.float() for bias in biases)
        self.library = library
        sizes = self.in_features, len(order), is_int4
        self.struct = structs.Linear(self.packed, self.scale, packed_bias, *sizes)

    def unpacked(self) -> Tensor:
        """Return the weights [packed outputs, in] in bfloat16."""
        numbers = self.packed
        if self.struct.is_int4:
            width = numbers.shape[1] // (1 + BLOCK_N // 2)
            factors = numbers[:, :width].view(len(numbers), -1, 1, BLOCK_N, 1).float() - FACTOR_ZERO
            pairs = numbers[:, width:].view(len(numbers), width // 8, 1, BLOCK_N, 4)
            q = torch.cat((pairs & 15, pairs >> 4), 2).float() - 8
            numbers = (q.view(*factors.shape[:2], -1, BLOCK_N, 4) * factors).flatten(1, 2)
        elif self.scale is not None:
            zero = self.library.number_of(b"weight zero")
            numbers = numbers.float() - zero if zero else numbers.view(torch.int8).float()
        # [blocks, groups, BLOCK_N, group] -> [blocks, BLOCK_N, width] -> [packed outputs, in]
        rows = numbers.transpose(1, 2).flatten(2).flatten(0, 1)[: self.struct.outputs, : self.in_features]
        return rows if self.scale is None else (rows * self.scale[: len(rows), None]).bfloat16()

    @property
    def weight(self) -> Tensor:
        """The weights [out, in], unpacked at every call."""
        return self._in_order(self.unpacked(), 0)

    @property
    def bias(self) -> Tensor | None:
        """The biases [out]."""
        bias = self.struct.alive["bias"]
        return None if bias is None else self._in_order(bias[: self.struct.outputs].bfloat16(), 0)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] in bfloat16 -> the product [..., out], rounded to bfloat16."""
        return self._in_order(self.product(x), -1)

    def product(
        self, x: Tensor, dtype: torch.dtype = torch.bfloat16, branches: int = 1, guidance: float = 1.0
    ) -> Tensor:
        """x [..., D] in bfloat16, whose first `in` columns are read -> [..., packed outputs] in bfloat16 or float32.

        branches 2: x [2 B, ...] is first guided with the scale `guidance` -> [B, ...].
        """
        leading = x.shape[:-1] if branches == 1 else (x.shape[0] // branches, *x.shape[1:-1])
        out = torch.empty(*leading, self.struct.outputs, dtype=dtype)
        if rows := math.prod(leading):
            sizes = rows, x.shape[-1], branches, dtype == torch.float32
            structs.LinearCall(self.struct, x, out, *sizes, guidance).run(self.library)
        return out

    def logits(self, features: Tensor, scale: float, branches: int) -> Tensor | None:
        """Compute the logits of `HeadLogits`."""
        return self.product(features, torch.float32, branches, scale) if computable(features) else None

    def _in_order(self, x: Tensor, dim: int) -> Tensor:
        """Return x without the packed outputs that are zeros, in the order of the layers."""
        return x if self.packed_outputs is None else x.index_select(dim, self.packed_outputs)


def computable(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the kernels compute from x: on a CPU, outside of traced graphs, and of the `dtype` that a kernel reads."""
    return on_host(x) and x.dtype == dtype


def packable(like: Tensor) -> bool:
    """Whether a weight can be packed: in bfloat16 on a CPU, and no subclass of Tensor, as torchao's have no memory of their own."""
    return type(like.detach()) is Tensor and like.dtype == torch.bfloat16 and like.device.type == "cpu"
