"""The guesses of a tree in C (`sampling.c`), in float32 on a CPU: logits, probabilities and draws.

They are many small operations over V codes, and for few rows starting PyTorch's takes longer than computing them.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_int64, c_void_p

import torch
from torch import Tensor, nn

from lanternpp.kernels.chain import Warp, fits, row_scratch, struct_of
from lanternpp.kernels.linear import KernelLinear, Packed, packable
from lanternpp.kernels.loading import kernels
from lanternpp.types import Warping, on_host


class Rows(Structure):
    """`Rows` of sampling.c."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "codes")),
        ("sampling", Warp),
        *((name, c_void_p) for name in ("logits", "probs", "scratch")),
    )


class Children(Structure):
    """`Children` of sampling.c."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "codes", "each", "count")),
        *((name, c_void_p) for name in ("q", "u", "drawn", "scratch")),
    )


class NativeHead:
    """A linear head of guided features."""

    def __init__(self, head: Packed, library: ctypes.CDLL):
        self.library, self.packed = library, head

    def takes(self, features: Tensor) -> bool:
        """Whether it computes the logits of features [R, N, D]."""
        return on_host(features) and features.dtype == torch.bfloat16

    def __call__(self, features: Tensor, scale: float, branches: int) -> Tensor | None:
        """Features [R, N, D] -> logits [B, N, V] in float32 of those guided with this scale, where there are two branches."""
        if not self.takes(features):
            return None
        return self.packed(features, torch.float32, branches, scale)


class NativeSampling:
    """The probabilities and draws of `Sampling`."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library

    def takes(self, x: Tensor) -> bool:
        """Whether it computes those of logits or probabilities x [..., V]."""
        return fits(x)

    def probs(self, logits: Tensor, warp: Warping) -> Tensor | None:
        """As `Sampling.probs`; warp: temperature, top-k and top-p."""
        if not self.takes(logits):
            return None
        logits = logits.contiguous()
        out, vocab, threads = torch.empty_like(logits), logits.shape[-1], torch.get_num_threads()
        given = (logits, out, row_scratch(self.library, vocab, threads))
        work = Rows(logits.numel() // vocab, vocab, struct_of(warp), *(x.data_ptr() for x in given))
        self.library.row_probs(byref(work), threads)
        return out

    def children(self, q: Tensor, u: Tensor | None, count: int) -> Tensor | None:
        """q [..., V] -> the first `count` different codes drawn at u [..., M] uniform; without u the likeliest, [..., count]."""
        if not self.takes(q):
            return None
        q, vocab, each, threads = q.contiguous(), q.shape[-1], 0, torch.get_num_threads()
        if u is not None:
            u, each = u.contiguous(), u.shape[-1]
        out = torch.empty(*q.shape[:-1], count, dtype=torch.int64)
        places = (q, u, out, row_scratch(self.library, vocab, threads, each))
        given = (None if x is None else x.data_ptr() for x in places)
        work = Children(q.numel() // vocab, vocab, each, count, *given)
        self.library.draw_children(byref(work), threads)
        return out


def native_head(layer: nn.Module | None) -> NativeHead | None:
    """A head in C; None where it is not linear, or the weights or this machine do not allow it."""
    found = kernels()
    if found is None or layer is None:
        return None
    if isinstance(layer, KernelLinear):
        return NativeHead(layer.packed, found)
    if not isinstance(layer, nn.Linear) or not packable(layer.weight):
        return None
    return NativeHead(Packed(found, [layer.weight], [layer.bias], int8=False), found)
