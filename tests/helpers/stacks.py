"""Passes of a `Stack` by plain PyTorch operations, in the dtype of their inputs: what kernels are compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.nn.decoder import HeadScale, Stack, StackLayer, additive_mask, rotate
from lanternpp.types import Nodes


class StackPasses:
    """A `DecoderForward` of a stack: x [R, N, D] of any dtype, keys and values [L, 2, R, Hkv, S, d or more] in the order of `qk_order`."""

    def __init__(self, stack: Stack, rotary_table: Tensor):
        self.stack, self.rotary_table = stack, rotary_table
        self.passes = 0

    def __call__(self, x: Tensor, nodes: Nodes, kv: Tensor, aux_layers: tuple[int, ...] = ()) -> Tensor:
        """As `Decoder.forward`."""
        self.passes += 1
        rotation = self.rotary_table[nodes.position.clamp(max=len(self.rotary_table) - 1)][:, :, :, None].to(
            x.dtype
        )
        aux = []
        for number, layer in enumerate(self.stack.layers):
            inner = _normed(x, layer.attention_norm, self.stack.eps)
            inner = self._attention(layer, inner, rotation, nodes, kv[number])
            x = x + _normed(inner, layer.attention_out_norm, self.stack.eps)
            inner = _normed(x, layer.ffn_norm, self.stack.eps)
            gate, up = _linear(inner, layer.gate_up).chunk(2, -1)
            gate = F.silu(gate) if self.stack.gate == "silu" else F.gelu(gate, approximate="tanh")
            inner = _linear(gate * up, [layer.down])
            x = x + _normed(inner, layer.ffn_out_norm, self.stack.eps)
            if number in aux_layers:
                aux.append(x)
        return torch.cat((_normed(x, self.stack.norm, self.stack.eps), *aux), -1)

    def _attention(self, layer: StackLayer, x: Tensor, rotation: Tensor, nodes: Nodes, kv: Tensor) -> Tensor:
        stack = self.stack
        heads = _linear(x, layer.qkv).unflatten(-1, (-1, stack.head_dim))
        q, k, v = heads.split((stack.heads, stack.kv_heads, stack.kv_heads), 2)
        q, k = self._turned(q, layer.q_norm, rotation), self._turned(k, layer.k_norm, rotation)
        row = torch.arange(len(x))[:, None]
        kv = kv[..., : stack.head_dim]  # a cache has more channels where heads are narrow
        for stored, new in zip(kv, (k, v), strict=True):
            stored[..., : stack.head_dim].transpose(1, 2)[row, nodes.slot] = new
        keys, values = (
            each[..., : stack.head_dim].repeat_interleave(stack.heads // stack.kv_heads, 1) for each in kv
        )
        scale = stack.head_dim**-0.5 if stack.scale is None else stack.scale
        scores = scale * q.transpose(1, 2) @ keys.transpose(2, 3) + additive_mask(nodes.mask, x.dtype)
        y = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
        return _linear(y, [layer.out])

    def _turned(self, x: Tensor, norm: HeadScale | None, rotation: Tensor) -> Tensor:
        if norm is not None:
            weight, bias = norm
            unit = x - x.mean(-1, keepdim=True) if self.stack.qk_norm == "layer" else x
            x = F.rms_norm(unit, unit.shape[-1:], eps=self.stack.qk_eps) * weight.to(x.dtype)
            x = x if bias is None else x + bias.to(x.dtype)
        order = self.stack.qk_order
        return rotate(x if order is None else x[..., order], rotation)


def with_biases(module: nn.Module) -> nn.Module:
    """The same module with random biases in its linear layers, as layers of transformers may have."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.bias = nn.Parameter(torch.randn(layer.out_features) * 0.1, requires_grad=False)
    return module


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


def _linear(x: Tensor, parts: list[nn.Linear] | tuple[nn.Linear, ...]) -> Tensor:
    """The outputs of linear layers, concatenated."""
    outputs = [
        F.linear(x, part.weight.to(x.dtype), None if part.bias is None else part.bias.to(x.dtype))
        for part in parts
    ]
    return torch.cat(outputs, -1)
