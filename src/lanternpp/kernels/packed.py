"""Modules for inference on a CPU: linear layers in C, convolutions with weights prepacked for oneDNN, group norms.

oneDNN reorders a convolution's weights at every call, a third of the time of the tokenizer's decoder; here they are reordered once.
The results of the group norms do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.kernels.decoder import kernel_decoder, pack_block
from lanternpp.kernels.linear import kernel_linear, packable
from lanternpp.nn.decoder import Block, Decoder

MOST_SERIAL = 1 << 20  # values of an input that one thread normalises; larger ones gain from more threads


class PackedConvolution(nn.Module):
    """x [B, in, H, W] -> [B, out, H', W'] on a CPU, for inference; weights are reordered for the size of the first x."""

    def __init__(self, plain: nn.Conv2d):
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self.dials = (*map(list, (plain.padding, plain.stride, plain.dilation)), plain.groups)
        self.packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The convolution."""
        if self.packed is None:
            reorder = torch.ops.mkldnn._reorder_convolution_weight
            self.packed = reorder(self.weight.detach(), *self.dials, list(x.shape))
        return torch.ops.mkldnn._convolution_pointwise(x, self.packed, self.bias, *self.dials, "none", [], "")


class SerialGroupNorm(nn.Module):
    """Group normalisation of x [B, C, H, W] by one thread, unless x is large.

    Where channels come last, PyTorch adds up what each thread has summed, so that the result depends on how many there are.
    `torch.set_num_threads` would also set the number of those threads that begin meanwhile.
    """

    def __init__(self, plain: nn.GroupNorm, library: ctypes.CDLL):
        super().__init__()
        self.weight, self.bias, self.library = plain.weight, plain.bias, library
        self.groups, self.eps = plain.num_groups, plain.eps

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x."""
        before = self.library.use_threads(1) if x.numel() <= MOST_SERIAL else 0
        try:
            return F.group_norm(x, self.groups, self.weight, self.bias, self.eps)
        finally:
            if before:
                self.library.use_threads(before)


def packed_convolution(plain: nn.Conv2d) -> nn.Module | None:
    """A convolution with packed weights; None where they cannot be packed: float32 on a CPU can, and bfloat16 on some."""
    weight, known = plain.weight, plain.padding_mode == "zeros" and not isinstance(plain.padding, str)
    if not known or weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    able = onednn("_reorder_convolution_weight", "_convolution_pointwise") and supports(weight.dtype)
    return PackedConvolution(plain) if able else None


def serial_norm(plain: nn.GroupNorm, library: ctypes.CDLL | None) -> nn.Module | None:
    """The same normalisation by one thread; None on other devices than a CPU, and where there are no kernels."""
    host = plain.affine and plain.weight.device.type == "cpu"
    return SerialGroupNorm(plain, library) if host and library is not None else None


def onednn(*operations: str) -> bool:
    """Whether this PyTorch has these operations of oneDNN."""
    there = torch.backends.mkldnn.is_available()
    return there and all(hasattr(torch.ops.mkldnn, name) for name in operations)


def supports(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in this dtype on this CPU."""
    if dtype != torch.bfloat16:
        return True
    return onednn("_is_mkldnn_bf16_supported") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(module: nn.Module, library: ctypes.CDLL | None, int8: bool) -> None:
    """Replace the linear layers, convolutions and group norms below `module` that can be; it is for inference from then on.

    int8: whether a decoder's linear layers have 8 bits.
    """
    if isinstance(module, Block) and library is not None:
        pack_block(module, library, int8)
    if isinstance(module, Decoder) and library is not None:
        module.native = kernel_decoder(module, library, int8)
    for name, child in module.named_children():
        made: nn.Module | None = None
        if type(child) is nn.Linear:
            made = (
                kernel_linear(child, library, int8=False)
                if library is not None and packable(child.weight)
                else None
            )
        elif type(child) is nn.Conv2d:
            made = packed_convolution(child)
        elif type(child) is nn.GroupNorm:
            made = serial_norm(child, library)
        if made is None:
            pack(child, library, int8)
        else:
            setattr(module, name, made)
