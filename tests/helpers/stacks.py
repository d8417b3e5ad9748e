"""Passes of a `Stack` by plain PyTorch operations, in the dtype of their inputs: what kernels are compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.nn.decoder import Stack, StackLayer, additive_mask, rotate
from lanternpp.types import Nodes


class StackPasses:
    """A `DecoderForward` of a stack: x [R, N, D] of any dtype, keys and values [L, 2, R, Hkv, S, d or more] in the order of `qk_order`."""

    def __init__(self, stack: Stack, rotary_table: Tensor):
        self.stack, self.rotary_table = stack, rotary_table
        self.passes, self.eps = 0, stack.config.norm_eps

    def __call__(self, x: Tensor, nodes: Nodes, kv: Tensor, aux_layers: tuple[int, ...] = ()) -> Tensor:
        """As `Decoder.forward`."""
        self.passes += 1
        rotation = self.rotary_table[nodes.position.clamp(max=len(self.rotary_table) - 1)][:, :, :, None].to(
            x.dtype
        )
        aux = []
        for number, layer in enumerate(self.stack.layers):
            inner = _normed(x, layer.attention_norm, self.eps)
            inner = self._attention(layer, inner, rotation, nodes, kv[number])
            x = x + _normed(inner, layer.attention_out_norm, self.eps)
            inner = _normed(x, layer.ffn_norm, self.eps)
            gate, up = _linear(inner, layer.gate_up).chunk(2, -1)
            gate = F.silu(gate) if self.stack.gate == "silu" else F.gelu(gate, approximate="tanh")
            inner = _linear(gate * up, [layer.down])
            x = x + _normed(inner, layer.ffn_out_norm, self.eps)
            if number in aux_layers:
                aux.append(x)
        return torch.cat((_normed(x, self.stack.norm, self.eps), *aux), -1)

    def _attention(self, layer: StackLayer, x: Tensor, rotation: Tensor, nodes: Nodes, kv: Tensor) -> Tensor:
        config = self.stack.config
        rotated = config.heads + config.num_kv_heads
        heads = _linear(x, layer.qkv).unflatten(-1, (-1, config.head_dim))
        q, k = self._turned(heads[:, :, :rotated], layer, rotation).tensor_split([config.heads], 2)
        v = heads[:, :, rotated:]
        row = torch.arange(len(x))[:, None]
        kv = kv[..., : config.head_dim]  # a cache has more channels where heads are narrow
        for stored, new in zip(kv, (k, v), strict=True):
            stored[..., : config.head_dim].transpose(1, 2)[row, nodes.slot] = new
        keys, values = (
            each[..., : config.head_dim].repeat_interleave(config.heads // config.num_kv_heads, 1)
            for each in kv
        )
        scores = config.head_dim**-0.5 * q.transpose(1, 2) @ keys.transpose(2, 3)
        scores = scores + additive_mask(nodes.mask, x.dtype)
        y = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
        return _linear(y, [layer.out])

    def _turned(self, x: Tensor, layer: StackLayer, rotation: Tensor) -> Tensor:
        if layer.qk_norm is not None:
            weight, bias = layer.qk_norm
            layer_norm = self.stack.qk_norm == "layer"
            x = F.layer_norm(x, x.shape[-1:]) if layer_norm else F.rms_norm(x, x.shape[-1:], eps=self.eps)
            x = x * weight.to(x.dtype)
            x = x if bias is None else x + bias.to(x.dtype)
        return rotate(x[..., self.stack.qk_order], rotation)


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
