"""Modules for inference on a CPU: linear layers in C, convolutions with weights prepacked for oneDNN, group norms.

oneDNN reorders a convolution's weights at every call, a third of the time of the tokenizer's decoder; here they are reordered once.
The results of the group norms do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import CDLL
from typing import Any, cast

import torch
from torch import Tensor, nn

from lanternpp.kernels.linear import KernelLinear, packable
from lanternpp.kernels.networks import gate_up_order, kernel_decoder
from lanternpp.nn.decoder import Block, Decoder

MOST_SERIAL = 1 << 20  # values of an input that one thread normalises; larger ones gain from more threads


class PackedConvolution(nn.Conv2d):
    """x [B, in, H, W] -> [B, out, H', W'] on a CPU, for inference; weights are reordered for the size of the first x."""

    packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The convolution."""
        sizes = (*map(list, (self.padding, self.stride, self.dilation)), self.groups)
        if self.packed is None:
            reorder = torch.ops.mkldnn._reorder_convolution_weight
            self.packed = reorder(self.weight.detach(), *sizes, list(x.shape))
        return torch.ops.mkldnn._convolution_pointwise(x, self.packed, self.bias, *sizes, "none", [], "")


class SerialGroupNorm(nn.GroupNorm):
    """Group normalisation of x [B, C, H, W] by one thread, unless x is large.

    Where channels come last, PyTorch adds up what each thread has summed, so that the result depends on how many there are.
    `torch.set_num_threads` would also set the number of those threads that begin meanwhile.
    """

    library: CDLL

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x."""
        before = self.library.use_threads(1) if x.numel() <= MOST_SERIAL else 0
        try:
            return super().forward(x)
        finally:
            if before:
                self.library.use_threads(before)


def supports(plain: nn.Conv2d) -> bool:
    """Whether oneDNN has such a convolution with prepacked weights, in this dtype on this CPU."""
    ops, dtype = torch.ops.mkldnn, plain.weight.dtype
    there = torch.backends.mkldnn.is_available() and hasattr(ops, "_convolution_pointwise")
    known = plain.padding_mode == "zeros" and not isinstance(plain.padding, str)
    half = dtype == torch.bfloat16 and there and ops._is_mkldnn_bf16_supported()
    return there and known and bool(half or dtype == torch.float32)


def pack(module: nn.Module, library: CDLL | None, int8: bool = False) -> None:
    """Make the linear layers, convolutions and group norms below `module` that can be packed ones; it is for inference from then on.

    int8: whether a decoder's linear layers have 8 bits. library None: convolutions alone.
    """
    block, children = isinstance(module, Block), cast("Iterable[tuple[str, Any]]", module.named_children())
    for name, child in children:
        kind, weight = type(child), getattr(child, "weight", None)
        host = isinstance(weight, Tensor) and weight.device.type == "cpu"
        if kind is nn.Linear and library is not None and packable(child.weight):
            order = gate_up_order(len(child.weight) // 2) if block and name == "w13" else None
            setattr(module, name, KernelLinear(library, [(child.weight, child.bias)], int8 and block, order))
        elif kind is nn.Conv2d and host and supports(child):
            child.__class__ = PackedConvolution
        elif kind is nn.GroupNorm and host and library is not None:
            child.__class__, child.library = SerialGroupNorm, library
        else:
            pack(child, library, int8)
    if library is not None and isinstance(module, Decoder) and type(module).stack is Decoder.stack:
        module.native = kernel_decoder(module.stack(), module.rotary_table, library, int8)
