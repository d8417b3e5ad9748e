"""Linear layers whose weights lie in memory once, packed as the kernels read them, in bfloat16 or in 8 bits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.kernels.loading import kernels
from lanternpp.kernels.memory import PAGES, scratch
from lanternpp.kernels.structs import BLOCK_N, K_ALIGN, Linear, LinearCall, Packing
from lanternpp.nn.int8 import stored_parts
from lanternpp.types import on_host


class Packed:
    """Weights and biases of linear layers with the same inputs, as one layer: the structure `Linear`, and its memory.

    weights: [out, in] each, bfloat16, or with the 8 bits of their checkpoint. int8: whether they are packed in 8 bits, with a scale
    per output; bits and scales of a checkpoint are taken as they are. order [outputs]: the row, of all weights one after the other,
    that each output is; -1: zeros.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        int8: bool,
        order: Tensor | None = None,
    ):
        self.library, self.int8 = library, int8
        stored = [found for weight in weights if int8 and (found := stored_parts(weight))]
        exact = len(stored) == len(weights)
        plain = [weight.detach().to(torch.bfloat16) for weight in weights] if not exact else []
        parts = [part.contiguous() for part in ([part for part, _ in stored] if exact else plain)]
        rows, self.inputs = sum(map(len, parts)), parts[0].shape[1]
        order = torch.arange(rows) if order is None else order
        self.outputs, blocks = len(order), -(-len(order) // BLOCK_N)
        self.order = F.pad(order, (0, blocks * BLOCK_N - len(order)), value=-1)
        row = [x.data_ptr() + torch.arange(len(x)) * self.inputs * x.element_size() for x in parts]
        width, together = -(-self.inputs // K_ALIGN) * K_ALIGN, 4 if int8 else 2
        shape = (blocks, width // together, BLOCK_N, together)
        self.weight = PAGES.empty(shape, torch.int8 if int8 else torch.bfloat16)
        self.scale = torch.zeros(blocks * BLOCK_N) if int8 else None
        given = _arranged(torch.cat([scale.float() for _, scale in stored]), self.order) if exact else None
        row_of = _arranged(torch.cat(row), self.order)
        sizes = {"blocks": blocks, "inputs": self.inputs, "width": width}
        packing = Packing(sizes, row=row_of, given=given, weight=self.weight, scale=self.scale)
        library.pack_linear(byref(packing), torch.get_num_threads())
        self.bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            some = [
                torch.zeros(len(part)) if bias is None else bias.detach().float()
                for bias, part in zip(biases, parts, strict=True)
            ]
            self.bias = _arranged(torch.cat(some), self.order)
        sizes = {"inputs": self.inputs, "outputs": self.outputs}
        self.struct = Linear(sizes, weight=self.weight, scale=self.scale, bias=self.bias)

    def unpacked(self) -> Tensor:
        """The weights [outputs, inputs], in the packed order, in bfloat16."""
        rows = self.weight.transpose(1, 2).flatten(2).flatten(0, 1)[: self.outputs, : self.inputs]
        if self.scale is None:
            return rows
        zero = self.library.weight_zero()
        whole = rows.view(torch.uint8).float() - zero if zero else rows.float()
        return (whole * self.scale[: self.outputs, None]).bfloat16()

    def __call__(self, x: Tensor, dtype: torch.dtype, branches: int = 1, guidance: float = 1.0) -> Tensor:
        """x [..., D] in bfloat16, of which the first `inputs` are read -> [..., outputs] in bfloat16 or float32.

        branches 2: x [2 B, ...] is guided with this scale first -> [B, ...].
        """
        x = x.contiguous()
        leading = x.shape[:-1] if branches == 1 else (x.shape[0] // branches, *x.shape[1:-1])
        out = torch.empty(*leading, self.outputs, dtype=dtype)
        if count := out.numel() // self.outputs:
            sizes = {"rows": count, "pitch": x.shape[-1], "branches": branches, "guidance": guidance}
            memory = scratch(self.library.linear_bytes(byref(self.struct), count))
            call = LinearCall(sizes, x=x, out=out, scratch=memory, out_is_float=dtype == torch.float32)
            self.library.linear(byref(self.struct), byref(call), torch.get_num_threads())
        return out


class KernelLinear(nn.Module):
    """`nn.Linear` with packed weights, for inference: x [..., in] -> [..., out].

    inverse [out]: the packed output that each output of the layer is; None: they are in order.
    """

    def __init__(self, packed: Packed, inverse: Tensor | None = None):
        super().__init__()
        self.packed, self.inverse = packed, inverse
        self.in_features, self.dtype = packed.inputs, torch.bfloat16
        self.out_features = packed.outputs if inverse is None else len(inverse)

    @property
    def bias(self) -> Tensor | None:
        """[out]."""
        bias = self.packed.bias
        return None if bias is None else self._ordered(bias[: self.packed.outputs].bfloat16())

    @property
    def weight(self) -> Tensor:
        """[out, in], unpacked each time that it is asked for."""
        return self._ordered(self.packed.unpacked())

    def forward(self, x: Tensor) -> Tensor:
        """The product, rounded to bfloat16."""
        if not takes(x):
            return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        out = self.packed(x, torch.bfloat16)
        return out if self.inverse is None else out[..., self.inverse]

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self.inverse is None else x[self.inverse]


class NativeHead:
    """A linear head of guided features."""

    def __init__(self, head: Packed):
        self.packed = head

    def __call__(self, features: Tensor, scale: float, branches: int) -> Tensor | None:
        """Features [R, N, D] -> logits [B, N, V] in float32 of those guided with this scale, where there are two branches."""
        return self.packed(features, torch.float32, branches, scale) if takes(features) else None


def takes(x: Tensor) -> bool:
    """Whether the kernels compute from these inputs."""
    return on_host(x) and x.dtype == torch.bfloat16


def packable(weight: Tensor) -> bool:
    """Whether a weight is one that can be packed: bfloat16 on a CPU, or the 8 bits of one."""
    plain = type(weight.detach()) is Tensor or stored_parts(weight) is not None
    return plain and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"


def kernel_linear(
    layer: nn.Linear, library: ctypes.CDLL, int8: bool, order: Tensor | None = None
) -> KernelLinear:
    """A linear layer with packed weights; order: as of `Packed`, with every output once."""
    packed = Packed(library, [layer.weight], [layer.bias], int8, order)
    if order is None:
        return KernelLinear(packed)
    inverse = torch.empty(layer.out_features, dtype=torch.int64)
    inverse[order[order >= 0]] = torch.arange(len(order))[order >= 0]
    return KernelLinear(packed, inverse)


def native_head(layer: nn.Module | None) -> NativeHead | None:
    """A head in C; None where it is not linear, or the weights or this machine do not allow it."""
    library = kernels()
    if library is not None and isinstance(layer, KernelLinear):
        return NativeHead(layer.packed)
    if library is None or not isinstance(layer, nn.Linear) or not packable(layer.weight):
        return None
    return NativeHead(Packed(library, [layer.weight], [layer.bias], int8=False))


def _arranged(x: Tensor, order: Tensor) -> Tensor:
    """x [n] in an order [m], 0 where that is -1."""
    return torch.where(order < 0, torch.zeros((), dtype=x.dtype), x[order.clamp(min=0)])
