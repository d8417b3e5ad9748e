"""A decoder's pass in OpenVINO: a graph with each layer's keys and values as inputs, and the nodes' keys and values as outputs.

Scores of earlier slots and of the nodes are separate products, as joining keys would copy the cache in every layer. In 8 bits,
weights and activations are quantised in groups; the head stays in bfloat16 and everything else in float32, as OpenVINO
quantises no activations of another dtype.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import BRANCHES, FILLED, SHAPES, UnavailableError, read_weights
from torch import Tensor

GROUP = 64  # of weights and activations that share a scale
SMALL = 1 << 28  # bytes of weights, up to which every number of nodes has a compiled graph of its own

try:
    import openvino
    from openvino import opset15 as op
except ImportError:
    openvino = None


def numbers(*values: int) -> Any:
    """Return a constant vector of integers."""
    return op.constant(np.array(values, np.int64))


def scalar(value: float) -> Any:
    """Return a constant float."""
    return op.constant(np.float32(value))


def view(x: Tensor) -> Any:
    """Return a tensor of OpenVINO that shares the memory of a tensor of PyTorch."""
    if x.dtype != torch.bfloat16:
        return openvino.Tensor(x.numpy(), shared_memory=True)
    return openvino.Tensor(x.view(torch.uint16).numpy(), list(x.shape), openvino.Type.bf16)


class Graph:
    """The decoder and its head, for any number of nodes."""

    def __init__(self, weights: Path, int8: bool):
        self.config, _ = SHAPES[weights.stem]
        self.int8, self.weights = int8, read_weights(weights)
        self.held: list[Tensor] = []  # what constants share memory with

    def linear(self, x: Any, weight: Tensor, int8: bool) -> Any:
        """Multiply x [..., in] by a weight: [..., out]."""
        if int8:
            groups = weight.float().unflatten(1, (-1, GROUP))
            scale = groups.abs().amax(-1, keepdim=True) / 127
            self.held.append((groups / scale).round().to(torch.int8))
            whole = op.convert(op.constant(view(self.held[-1]), shared_memory=True), np.float32)
            full = op.reshape(op.multiply(whole, op.constant(scale.numpy())), numbers(*weight.shape), False)
        else:
            self.held.append(weight.bfloat16().contiguous())
            full = op.convert(op.constant(view(self.held[-1]), shared_memory=True), np.float32)
        return op.matmul(x, full, False, True)

    def norm(self, x: Any, name: str) -> Any:
        """Build RMSNorm in the form that OpenVINO recognises."""
        mean = op.reduce_mean(op.power(x, scalar(2)), numbers(-1), True)
        unit = op.divide(scalar(1), op.sqrt(op.add(mean, scalar(self.config.norm_eps))))
        return op.multiply(op.multiply(x, unit), op.constant(self.weights[name].float().numpy()))

    def heads(self, x: Any) -> Any:
        """Split heads: [R, N, H d] -> [R, H, N, d]."""
        split = op.reshape(x, numbers(0, 0, -1, self.config.head_dim), True)
        return op.transpose(split, numbers(0, 2, 1, 3))

    def rotated(self, x: Any, cos: Any, sin: Any) -> Any:
        """Build rotary embeddings in the form that OpenVINO recognises."""
        half = self.config.head_dim // 2
        first, second = op.variadic_split(x, op.constant(3), numbers(half, half)).outputs()
        turned = op.concat([op.multiply(second, scalar(-1)), first], -1)
        return op.add(op.multiply(x, cos), op.multiply(turned, sin))

    def model(self) -> Any:
        """Build the graph.

        Inputs: x [2, N, D], cosines and sines [1, 1, N, d], additive mask [2, 1, N, FILLED + N], keys and values of each
        layer [2, H, FILLED, d]. Outputs: logits [2, N, V], keys and values of the nodes [2, H, N, d]."""
        dim, head_dim, heads = self.config.dim, self.config.head_dim, self.config.heads
        x = op.parameter([BRANCHES, -1, dim], np.float32)
        cos, sin = (op.parameter([1, 1, -1, head_dim], np.float32) for _ in range(2))
        mask = op.parameter([BRANCHES, 1, -1, -1], np.float32)
        inputs, outputs = [x, cos, sin, mask], []
        kept = openvino.Type.f32 if self.int8 else openvino.Type.bf16
        for i in range(self.config.layers):
            prefix = f"blocks.{i}."
            old = [op.parameter([BRANCHES, heads, FILLED, head_dim], kept) for _ in range(2)]
            keys, values = (op.convert(tensor, np.float32) for tensor in old)
            y = self.norm(x, f"{prefix}attention_norm.weight")
            parts = self.weights[f"{prefix}wqkv.weight"].chunk(3)
            q, k, v = (self.heads(self.linear(y, part, self.int8)) for part in parts)
            q, k = op.multiply(self.rotated(q, cos, sin), scalar(head_dim**-0.5)), self.rotated(k, cos, sin)
            scores = op.concat([op.matmul(q, keys, False, True), op.matmul(q, k, False, True)], -1)
            share = op.softmax(op.add(scores, mask), -1)
            earlier, own = op.variadic_split(share, op.constant(3), numbers(FILLED, -1)).outputs()
            y = op.add(op.matmul(earlier, values, False, False), op.matmul(own, v, False, False))
            y = op.reshape(op.transpose(y, numbers(0, 2, 1, 3)), numbers(0, 0, dim), True)
            x = op.add(x, self.linear(y, self.weights[f"{prefix}wo.weight"], self.int8))
            y = self.norm(x, f"{prefix}ffn_norm.weight")
            gate, up = (
                self.linear(y, part, self.int8) for part in self.weights[f"{prefix}w13.weight"].chunk(2)
            )
            gated = op.multiply(op.swish(gate), up)
            x = op.add(x, self.linear(gated, self.weights[f"{prefix}w2.weight"], self.int8))
            inputs += old
            outputs += [k, v]
        logits = self.linear(self.norm(x, "norm.weight"), self.weights["head"], False)
        return openvino.Model([logits, *outputs], inputs)

    def write(self, path: Path) -> None:
        """Write the graph to a file, which is mapped into memory when it is read, so that weights are not held twice."""
        openvino.save_model(self.model(), path, compress_to_fp16=False)
        document = ElementTree.parse(path)
        for layer in document.iter("layer"):
            source = layer.find("input/port")
            if layer.get("type") == "Convert" and source is not None and source.get("precision") == "BF16":
                # Without this mark weights become float32 while the graph is compiled.
                mark = ElementTree.Element("rt_info")
                ElementTree.SubElement(mark, "attribute", name="decompression", version="0")
                layer.insert(1, mark)
        document.write(path)


class OpenVINO:
    """The compiled graph."""

    def __init__(self, weights: Path, int8: bool = False):
        if openvino is None:
            raise UnavailableError("pip install openvino")
        self.int8, (self.config, _) = int8, SHAPES[weights.stem]
        self.path = weights.with_name(f"{weights.stem}-{'int8' if int8 else 'bf16'}.xml")
        if not self.path.is_file():
            Graph(weights, int8).write(self.path)
        self.table = read_weights(weights)["rotary_table"]
        self.small = self.path.with_suffix(".bin").stat().st_size < SMALL
        self.requests: dict[int, Any] = {}
        self.inputs: dict[tuple[int, int], list[Tensor]] = {}
        size = (BRANCHES, self.config.heads, FILLED, self.config.head_dim)
        dtype = torch.float32 if int8 else torch.bfloat16
        self.kv = [torch.randn(size).to(dtype) for _ in range(2 * self.config.layers)]

    def request(self, count: int) -> Any:
        """Return a request for passes over `count` nodes of each branch."""
        key = count if self.small else 0
        if key not in self.requests:
            core = openvino.Core()
            model = core.read_model(self.path)
            if self.small:
                head_dim = self.config.head_dim
                sizes = [[BRANCHES, count, self.config.dim], [1, 1, count, head_dim], [1, 1, count, head_dim]]
                sizes.append([BRANCHES, 1, count, FILLED + count])
                model.reshape(dict(zip(model.inputs, sizes, strict=False)))
            options = {
                "INFERENCE_PRECISION_HINT": "f32" if self.int8 else "bf16",
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": torch.get_num_threads(),
                "NUM_STREAMS": 1,
            }
            if self.int8:
                options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = GROUP
            self.requests[key] = core.compile_model(model, "CPU", options).create_infer_request()
            for i, tensor in enumerate(self.kv):
                self.requests[key].set_input_tensor(4 + i, view(tensor))
        return self.requests[key]

    def chain(self, count: int, filled: int) -> list[Tensor]:
        """Return cosines, sines and mask of a chain of `count` nodes."""
        half = self.config.head_dim // 2
        cos, sin = self.table[filled : filled + count].float().unbind(1)
        sin = torch.cat((-sin[:, :half], sin[:, half:]), -1)
        seen = torch.zeros(count, FILLED + count, dtype=torch.bool)
        seen[:, :filled], seen[:, FILLED:] = True, torch.ones(count, count, dtype=torch.bool).tril()
        mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf")).expand(BRANCHES, 1, -1, -1)
        return [tensor.contiguous() for tensor in (cos[None, None], sin[None, None], mask)]

    def forward(self, x: Tensor, filled: int) -> np.ndarray:
        """Return logits [2, N, V] in float32 for x [2, N, D] in float32 after `filled` slots; the next pass overwrites them."""
        key = x.shape[1], filled
        if key not in self.inputs:
            self.inputs[key] = self.chain(*key)
        request = self.request(key[0])
        for i, tensor in enumerate((x.contiguous(), *self.inputs[key])):
            request.set_input_tensor(i, view(tensor))
        request.infer()
        return request.get_output_tensor(0).data

    def store(self, count: int, filled: int) -> None:
        """Write the keys and values of the last pass after the first `filled` slots."""
        for i, kept in enumerate(self.kv):
            new = torch.from_numpy(self.request(count).get_output_tensor(1 + i).data)
            kept[:, :, filled : filled + count] = new.to(kept.dtype)
