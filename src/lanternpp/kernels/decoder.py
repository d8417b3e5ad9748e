"""A decoder's passes in C (`csrc/decoder.c`), from the layers of a `Stack`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int64
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.kernels.linear import KernelLinear, Packed, kernel_linear, packable, takes
from lanternpp.kernels.memory import PAGES, scratch
from lanternpp.kernels.structs import HEAD_ALIGN, K_ALIGN, LANES, Layer, Pass, Shape
from lanternpp.nn.decoder import Block, Decoder
from lanternpp.nn.stack import HeadScale, Stack, StackLayer
from lanternpp.types import Nodes

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
        self.library, self.int8 = library, int8
        self.packed: list[dict[str, Packed]] = []
        self.layers = (Layer * len(stack.layers))()
        self.parts = list[Any]()  # the layers again, which keep their memory
        for i, layer in enumerate(stack.layers):
            self.packed.append(self._pack(stack, layer))
            self.parts.append(self._layer(stack, layer, self.packed[-1]))
            self.layers[i] = self.parts[-1]
            if release:
                for module in (*layer.qkv, layer.out, *layer.gate_up, layer.down):
                    module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
        sizes = {name: getattr(stack, name) for name in ("dim", "heads", "kv_heads", "head_dim", "hidden")}
        self.shape = Shape(
            sizes,
            layers=len(stack.layers),
            qk_kind=QK_KINDS.index(stack.qk_norm),
            gate_kind=GATES.index(stack.gate),
            norm=_norm(stack.norm, stack.dim),
            eps=stack.eps,
            qk_eps=stack.qk_eps,
            scale=stack.head_dim**-0.5 if stack.scale is None else stack.scale,
        )
        self.rotary_table = rotary_table.float().contiguous()
        self.kv_head_dim = -(-stack.head_dim // HEAD_ALIGN) * HEAD_ALIGN

    def takes(self, x: Tensor) -> bool:
        """Whether it computes a pass with inputs x [R, N, D]."""
        return takes(x)

    def __call__(self, x: Tensor, nodes: Nodes, kv: Tensor, aux_layers: tuple[int, ...] = ()) -> Tensor:
        """x [R, N, D] at `nodes` -> features [R, N, D]; their keys and values go to kv [L, 2, R, Hkv, S, `kv_head_dim`].

        aux_layers: as of `Decoder.forward`, [R, N, (1 + aux) D].
        """
        (rows, count, _), threads = x.shape, torch.get_num_threads()
        out = x.new_empty(rows, count, (1 + len(aux_layers)) * self.shape.dim)
        position = nodes.position.clamp(max=len(self.rotary_table) - 1)
        given = {"x": x, "rotation": self.rotary_table[position], "slot": nodes.slot, "mask": nodes.mask}
        work = Pass(
            {"rows": rows, "nodes": count, "slots": kv.shape[4], "parts": 1 + len(aux_layers)},
            {name: tensor.contiguous() for name, tensor in given.items()},
            {"kv": kv, "out": out, "part": self.part(aux_layers)},
        )
        size = self.library.scratch_bytes(byref(self.shape), self.layers, byref(work), threads)
        work.scratch = scratch(size)
        self.library.decode(byref(self.shape), self.layers, byref(work), threads)
        return out

    def part(self, aux_layers: tuple[int, ...]) -> Any:
        """Of every layer the part of a pass's outputs that its output is; 0: none."""
        part = (c_int64 * self.shape.layers)()
        for i, layer in enumerate(aux_layers):
            part[layer] = 1 + i
        return part

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

    def _layer(self, stack: Stack, layer: StackLayer, packed: dict[str, Packed]) -> Any:
        names = ("attention_norm", "ffn_norm", "attention_out_norm", "ffn_out_norm")
        qk = _head_scale(stack, layer.q_norm, layer.k_norm)
        return Layer(
            {name: _norm(getattr(layer, name), stack.dim) for name in names},
            {name: part.struct for name, part in packed.items()},
            dict(zip(("qk_norm", "qk_bias"), qk, strict=True)),
        )


def _head_scale(stack: Stack, q: HeadScale | None, k: HeadScale | None) -> list[Tensor | None]:
    """Weights and biases of the norms of queries and keys, [heads + kv_heads, d], in the stack's order."""
    found: list[Tensor | None] = []
    for pair in zip(q or (None, None), k or (None, None), strict=True):
        known = [x.detach().float() for x in pair if x is not None]
        both = torch.cat(known) if len(known) == 2 else None
        ordered = both if both is None or stack.qk_order is None else both[:, stack.qk_order]
        found.append(None if ordered is None else PAGES.put(ordered.contiguous()))
    return found


def _norm(weight: Tensor | None, dim: int) -> Tensor | None:
    """A norm's weight [dim], padded with zeros."""
    return None if weight is None else PAGES.put(F.pad(weight.detach().float(), (0, -dim % K_ALIGN)))


def _heads_order(stack: Stack) -> Tensor | None:
    """The rows of queries, keys and values, with channels of a head in the stack's order; None: as they are."""
    if stack.qk_order is None:
        return None
    rotated = stack.heads + stack.kv_heads
    rows = torch.arange((rotated + stack.kv_heads) * stack.head_dim).view(-1, stack.head_dim)
    return torch.cat((rows[:rotated, stack.qk_order], rows[rotated:])).flatten()


def gate_up_order(hidden: int) -> Tensor:
    """The rows of gate and up [2 * hidden], alternating by LANES, -1 after the last of each."""
    padded = F.pad(torch.arange(hidden), (0, -hidden % LANES), value=-1).view(-1, LANES)
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
