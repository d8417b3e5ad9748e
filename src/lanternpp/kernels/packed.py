"""Linear layers and convolutions with weights prepacked, for fast passes over few rows, and fast pictures, on a CPU.

Group norms are replaced too, by ones whose results do not depend on the number of threads.

oneDNN multiplies with weights in a blocked order. In a pass over a few codes much of the time goes into reordering them, and
of the tokenizer's decoder a third; here they are reordered once. Where the CPU has no products of bfloat16, which oneDNN then
computes slowly, they are computed in C.
"""

from __future__ import annotations

import ctypes
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.kernels.chain import LANES, PackedDense
from lanternpp.kernels.library import native
from lanternpp.kernels.loading import kernels
from lanternpp.kernels.sampling import NativeHead
from lanternpp.nn.decoder import Decoder
from lanternpp.nn.int8 import stored_parts
from lanternpp.nn.stores import restored

MOST_SERIAL = 1 << 20  # values of an input that one thread normalises; larger ones gain from more threads


class PackedLinear(nn.Module):
    """x [..., in] -> [..., out], bfloat16 on a CPU, for inference."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int = 64):
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], unpacked."""
        plain: Tensor = self.packed.to_dense()
        return plain

    def forward(self, x: Tensor) -> Tensor:
        """The product, rounded as `nn.Linear` rounds it."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


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


class NativeLinear(nn.Module):
    """What `PackedLinear` computes, in C, for CPUs without products of bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None, library: ctypes.CDLL):
        super().__init__()
        self.bias, self.outputs, self.eight_bits = bias, len(weight), stored_parts(weight)
        self.dtype = weight.dtype
        self.product = NativeHead(PackedDense(weight, bias), library)

    @cached_property
    def weight(self) -> Tensor:
        """The weight [out, in], unpacked when it is first asked for."""
        if self.eight_bits is None:
            return self.product.packed.blocks.transpose(1, 2).flatten(2).flatten(0, 1)[: self.outputs]
        plain = restored(*self.eight_bits).to(self.dtype)
        plain.eight_bits = self.eight_bits  # type: ignore[attr-defined]
        return plain

    def forward(self, x: Tensor) -> Tensor:
        """The product, rounded as `nn.Linear` rounds it."""
        found = self.product(x.reshape(1, -1, x.shape[-1]), 1.0, 1)
        if found is None:
            return F.linear(x, self.weight, self.bias)
        return found.to(x.dtype).view(*x.shape[:-1], self.outputs)


def packed(weight: Tensor, bias: Tensor | None) -> nn.Module | None:
    """A linear layer with packed weights; None where they cannot be packed: bfloat16 on a CPU can, in C or with oneDNN."""
    if type(weight.detach()) is not Tensor or weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return None  # torchao's 8-bit weights among them
    found = kernels()
    if found is not None and found.widens() and weight.shape[1] % LANES == 0:
        return NativeLinear(weight, bias, found)
    able = onednn("_reorder_linear_weight", "_linear_pointwise") and supports(weight.dtype)
    return PackedLinear(weight, bias) if able else None


def packed_convolution(plain: nn.Conv2d) -> nn.Module | None:
    """A convolution with packed weights; None where they cannot be packed: float32 on a CPU can, and bfloat16 on some."""
    weight, known = plain.weight, plain.padding_mode == "zeros" and not isinstance(plain.padding, str)
    if not known or weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    able = onednn("_reorder_convolution_weight", "_convolution_pointwise") and supports(weight.dtype)
    return PackedConvolution(plain) if able else None


def serial_norm(plain: nn.GroupNorm) -> nn.Module | None:
    """The same normalisation by one thread; None on other devices than a CPU, and where there are no kernels."""
    found = kernels() if plain.affine and plain.weight.device.type == "cpu" else None
    return None if found is None else SerialGroupNorm(plain, found)


def onednn(*operations: str) -> bool:
    """Whether this PyTorch has these operations of oneDNN."""
    there = torch.backends.mkldnn.is_available()
    return there and all(hasattr(torch.ops.mkldnn, name) for name in operations)


def supports(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in this dtype on this CPU."""
    if dtype != torch.bfloat16:
        return True
    return onednn("_is_mkldnn_bf16_supported") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(module: nn.Module) -> None:
    """Replace the linear layers, convolutions and group norms below `module` that can be; it is for inference from then on."""
    if isinstance(module, Decoder):
        module.native = native(module)
    for name, child in module.named_children():
        made = None
        if isinstance(child, nn.Linear):
            made = packed(child.weight, child.bias)
        elif type(child) is nn.Conv2d:
            made = packed_convolution(child)
        elif type(child) is nn.GroupNorm:
            made = serial_norm(child)
        if made is None:
            pack(child)
        else:
            setattr(module, name, made)
