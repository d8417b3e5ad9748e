"""A decoder's passes in C (`csrc/decoder.c`), from the layers of a `Stack`."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import addressof, byref, c_int64
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.kernels.layout import PAGES
from lanternpp.kernels.linear import KernelLinear, Packed, kernel_linear, packable
from lanternpp.kernels.structs import HEAD_ALIGN, K_ALIGN, LANES, Layer, Pass, Shape
from lanternpp.nn.decoder import Block, Decoder
from lanternpp.nn.stack import HeadScale, Stack, StackLayer
from lanternpp.types import Nodes, on_host

QK_KINDS, GATES = ("none", "rms", "layer"), ("silu", "gelu_tanh")
MAX_HEAD = 512


class KernelDecoder:
    """The passes of a stack. Its linear layers are packed, in `packed`, in 8 bits or in bfloat16; the stack's are not kept.

    rotary_table: [positions, 2, head_dim], in the stack's `qk_order`.
    """

    def __init__(
        self, stack: Stack, rotary_table: Tensor, library: ctypes.CDLL, int8: bool, release: bool = False
    ):
        """release: free the weights of every layer as soon as they are packed."""
        self.library, self.stack_shape, self.int8 = library, (stack.heads, stack.kv_heads), int8
        self._kept = list[Tensor]()
        self.packed: list[dict[str, Packed]] = []
        self.layers = (Layer * len(stack.layers))()
        for i, layer in enumerate(stack.layers):
            self.packed.append(self._pack(stack, layer))
            self.layers[i] = self._layer(stack, layer, self.packed[-1])
            if release:
                for module in (*layer.qkv, layer.out, *layer.gate_up, layer.down):
                    module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
        shape = (len(stack.layers), stack.dim, stack.heads, stack.kv_heads, stack.head_dim, stack.hidden)
        kinds = QK_KINDS.index(stack.qk_norm), GATES.index(stack.gate)
        scale = stack.head_dim**-0.5 if stack.scale is None else stack.scale
        norm = self._norm(stack.norm, stack.dim)
        self.shape = Shape(*shape, *kinds, norm, stack.eps, stack.qk_eps, scale)
        self.rotary_table = rotary_table.float().contiguous()
        self.kv_head_dim = -(-stack.head_dim // HEAD_ALIGN) * HEAD_ALIGN
        self.threads = threading.local()  # the scratch memory of each thread that calls

    def takes(self, x: Tensor) -> bool:
        """Whether it computes a pass with inputs x [R, N, D]."""
        return on_host(x) and x.dtype == torch.bfloat16

    def __call__(self, x: Tensor, nodes: Nodes, kv: Tensor, aux_layers: tuple[int, ...] = ()) -> Tensor:
        """x [R, N, D] at `nodes` -> features [R, N, D]; their keys and values go to kv [L, 2, R, Hkv, S, `kv_head_dim`].

        aux_layers: as of `Decoder.forward`, [R, N, (1 + aux) D].
        """
        rows, count, _ = x.shape
        threads, slots = torch.get_num_threads(), kv.shape[4]
        x, out = x.contiguous(), x.new_empty(rows, count, (1 + len(aux_layers)) * self.shape.dim)
        rotation = self.rotary_table[nodes.position.clamp(max=len(self.rotary_table) - 1)]
        given = (x, rotation, nodes.slot.contiguous(), nodes.mask.contiguous(), kv, out)
        part = (c_int64 * self.shape.layers)(*(0,) * self.shape.layers)
        for i, layer in enumerate(aux_layers):
            part[layer] = 1 + i
        work = Pass(
            rows, count, slots, *(t.data_ptr() for t in given), None, 1 + len(aux_layers), addressof(part)
        )
        size = self.library.scratch_bytes(byref(self.shape), self.layers, byref(work), threads)
        work.scratch = self._scratch(size + 64)
        self.library.decode(byref(self.shape), self.layers, byref(work), threads)
        return out

    def _scratch(self, size: int) -> int:
        """The address of at least so many bytes, the calling thread's own, at a multiple of 64."""
        kept: Tensor | None = getattr(self.threads, "scratch", None)
        if kept is None or len(kept) < size:
            kept = self.threads.scratch = torch.empty(size, dtype=torch.uint8)
        return -(-kept.data_ptr() // 64) * 64

    def _pack(self, stack: Stack, layer: StackLayer) -> dict[str, Packed]:
        """The four products of a layer."""
        return {
            "wqkv": self._linear(layer.qkv, _heads_order(stack)),
            "wo": self._linear([layer.out]),
            "w13": self._linear(layer.gate_up, gate_up_order(stack.hidden)),
            "w2": self._linear([layer.down]),
        }

    def _linear(self, modules: Sequence[Any], order: Tensor | None = None) -> Packed:
        if isinstance(modules[0], KernelLinear):
            return modules[0].packed
        weights, biases = [module.weight for module in modules], [module.bias for module in modules]
        return Packed(self.library, weights, biases, self.int8, order)

    def _layer(self, stack: Stack, layer: StackLayer, packed: dict[str, Packed]) -> Layer:
        norms = (layer.attention_norm, layer.ffn_norm, layer.attention_out_norm, layer.ffn_out_norm)
        qk: tuple[int | None, int | None] = (None, None)
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = self._head_scale(stack, layer.q_norm, layer.k_norm)
        return Layer(
            *(self._norm(norm, stack.dim) for norm in norms), *qk, *(part.struct for part in packed.values())
        )

    def _head_scale(self, stack: Stack, q: HeadScale, k: HeadScale) -> tuple[int | None, int | None]:
        found: list[int | None] = []
        for i in range(2):
            pair = q[i], k[i]
            if pair[0] is None or pair[1] is None:
                found.append(None)
                continue
            both = torch.cat([x.detach().float() for x in pair if x is not None])
            both = both if stack.qk_order is None else both[:, stack.qk_order]
            found.append(self._keep(both.contiguous()))
        return found[0], found[1]

    def _norm(self, weight: Tensor | None, dim: int) -> int | None:
        """The address of a norm's weight [dim], padded with zeros."""
        if weight is None:
            return None
        return self._keep(nn.functional.pad(weight.detach().float(), (0, -dim % K_ALIGN)))

    def _keep(self, tensor: Tensor) -> int:
        """The address of a tensor, which lives as long as this object."""
        self._kept.append(PAGES.put(tensor))
        return self._kept[-1].data_ptr()


def _heads_order(stack: Stack) -> Tensor | None:
    """The rows of queries, keys and values, with channels of a head in the stack's order; None: as they are."""
    if stack.qk_order is None:
        return None
    rotated = stack.heads + stack.kv_heads
    rows = torch.arange((rotated + stack.kv_heads) * stack.head_dim).view(-1, stack.head_dim)
    return torch.cat((rows[:rotated, stack.qk_order], rows[rotated:])).flatten()


def gate_up_order(hidden: int) -> Tensor:
    """The rows of gate and up [2 * hidden], alternating by LANES, -1 behind the last of each."""
    padded = nn.functional.pad(torch.arange(hidden), (0, -hidden % LANES), value=-1).view(-1, LANES)
    return torch.stack((padded, torch.where(padded < 0, -1, padded + hidden)), 1).flatten()


def unserved(stack: Stack) -> str | None:
    """Why the kernels do not compute a stack, in a few words; None where they do."""
    if stack.head_dim > MAX_HEAD or stack.head_dim % 2:
        return f"heads of {stack.head_dim} channels"
    for layer in stack.layers:
        for module in (*layer.qkv, layer.out, *layer.gate_up, layer.down):
            if not isinstance(module, KernelLinear) and not packable(module.weight):
                return f"a {type(module).__name__} whose weights are not bfloat16 on a CPU"
    return None


def pack_block(block: Block, library: ctypes.CDLL, int8: bool) -> None:
    """Replace the linear layers of a block by packed ones, where all of them can be."""
    layers = {name: getattr(block, name) for name in ("wqkv", "wo", "w13", "w2")}
    if all(type(layer) is nn.Linear and packable(layer.weight) for layer in layers.values()):
        for name, layer in layers.items():
            order = gate_up_order(block.w2.in_features) if name == "w13" else None
            setattr(block, name, kernel_linear(layer, library, int8, order))


def kernel_decoder(decoder: Decoder, library: ctypes.CDLL, int8: bool) -> KernelDecoder | None:
    """The passes of a decoder, whose linear layers are replaced by packed ones; None where its weights cannot be packed."""
    if type(decoder).stack is not Decoder.stack or decoder.config.head_dim > MAX_HEAD:
        return None
    for block in decoder.blocks:
        assert isinstance(block, Block)
        pack_block(block, library, int8)
        if not isinstance(block.w2, KernelLinear):
            return None
    return KernelDecoder(decoder.stack(), decoder.rotary_table, library, int8)
