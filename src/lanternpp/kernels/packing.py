"""Networks for inference on a CPU: decoders (`csrc/decoder.c`), a parallel drafter's layers before and after its decoder
(`chain.c`, `step.c`), linear layers, convolutions with weights prepacked for oneDNN, group norms.

oneDNN reorders a convolution's weights at every call, a third of the time of the tokenizer's decoder; a packed convolution reorders
them once. The results of the group norms do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import CDLL, c_int64
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.kernels.binding import K_ALIGN, LANES, own, structs
from lanternpp.kernels.linear import KernelLinear, computable, packable
from lanternpp.nn.checkpoints import quantised
from lanternpp.nn.decoder import Block, Decoder, Stack, StackLayer
from lanternpp.types import Draft, Nodes, Warping

QK_KINDS, GATES = ("none", "rms", "layer"), ("silu", "gelu_tanh")
# Fields that `StackLayer` and `Layer` of C have in common.
NORMS = ("attention_norm", "ffn_norm", "attention_out_norm", "ffn_out_norm")
MAX_HEAD_DIM = 512
LAYER_NORM_EPS = 1e-5  # of `HeadNorm` and of Chameleon's norms of heads
DRAFTER_LAYERS = ("fc", "hint", "down")  # layers of a drafter before and after its decoder
MAX_SERIAL = 1 << 20  # values of an input that one thread normalises; larger inputs gain from more threads


class KernelDecoder:
    """The passes of a stack, with copies of its linear layers that are packed in `dtype`.

    rotary_table: [positions, 2, head_dim], in the stack's `qk_order`. release: free a layer's weights once they are packed.
    """

    def __init__(self, stack: Stack, rotary_table: Tensor, library: CDLL, dtype: str, release: bool = False):
        self.library, self.dtype, self.rotary_table = library, dtype, rotary_table.float().contiguous()
        self.embeddings: Tensor | None = None  # of all codes, [V, D], set by `fused_step`
        self.layer_structs: list[Any] = []  # keep the tensors of every layer alive
        config = stack.config
        for layer in stack.layers:
            struct = structs.Layer(**{name: _norm(getattr(layer, name), config.dim) for name in NORMS})
            struct.wqkv = self._linear(layer.qkv, _heads_order(stack))
            struct.wo = self._linear([layer.out])
            struct.w13 = self._linear(layer.gate_up, gate_up_order(config.hidden))
            struct.w2 = self._linear([layer.down])
            if layer.qk_norm is not None:
                struct.qk_norm, struct.qk_bias = (
                    None if scale is None else scale.detach().float()[:, stack.qk_order]
                    for scale in layer.qk_norm
                )
            self.layer_structs.append(struct)
            for module in linear_layers(layer) if release else ():
                module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
        self.layers = (structs.Layer * len(self.layer_structs))(*self.layer_structs)
        sizes = len(self.layers), config.dim, config.heads, config.num_kv_heads, config.head_dim
        self.shape = structs.Shape(*sizes, QK_KINDS.index(stack.qk_norm), GATES.index(stack.gate))
        self.shape.norm, self.shape.eps = _norm(stack.norm, config.dim), config.norm_eps
        self.shape.qk_eps = LAYER_NORM_EPS if stack.qk_norm == "layer" else config.norm_eps
        self.shape.scale = config.head_dim**-0.5

    def use_threads(self, count: int) -> None:
        """Compute with `count` threads in the calling thread from now on, in PyTorch too where the kernels use its threads."""
        self.library.use_threads(count)
        own.threads = count if torch.get_num_threads() != count else 0

    def __call__(self, x: Tensor, nodes: Nodes, kv: Tensor, aux_layers: tuple[int, ...] = ()) -> Tensor:
        """Run the layers, as `DecoderForward` does, with keys and values [L, 2, R, Hkv, S, head_dim rounded up to 32].

        InputError unless inputs, keys and values are bfloat16.
        """
        if not (computable(x) and computable(kv)):
            raise InputError(
                f"the kernels compute in bfloat16, and this model's embeddings are {x.dtype}; use model.to(torch.bfloat16)"
            )
        rows, num_nodes, _ = x.shape
        out = x.new_empty(rows, num_nodes, (1 + len(aux_layers)) * self.shape.dim)
        call = structs.Pass(self.shape, self.layers, rows, num_nodes, kv.shape[4], x)
        call.rotation = self.rotary_table[nodes.position.clamp(max=len(self.rotary_table) - 1)]
        call.slot, call.mask, call.kv, call.out = nodes.slot, nodes.mask, kv, out
        call.parts, call.part = 1 + len(aux_layers), self.part(aux_layers)
        call.run(self.library)
        return out

    def part(self, aux_layers: tuple[int, ...]) -> Any:
        """Return, for every layer, the number of the part of a pass's outputs that holds its output; 0: no part."""
        part = (c_int64 * self.shape.layers)()
        for number, layer in enumerate(aux_layers, 1):
            part[layer] = number
        return part

    def _linear(self, modules: Sequence[Any], order: Tensor | None = None) -> Any:
        if isinstance(modules[0], KernelLinear):
            return modules[0].struct
        return KernelLinear(self.library, [(x.weight, x.bias) for x in modules], self.dtype, order).struct


def linear_layers(layer: StackLayer) -> tuple[Any, ...]:
    """Return the modules of a layer's four products."""
    return *layer.qkv, layer.out, *layer.gate_up, layer.down


def kernel_decoder(
    stack: Stack, rotary_table: Tensor, library: CDLL, dtype: str, release: bool = False
) -> KernelDecoder | None:
    """Return a `KernelDecoder`, or None where the kernels do not compute the stack."""
    modules = (module for layer in stack.layers for module in linear_layers(layer))
    can_pack = all(isinstance(module, KernelLinear) or packable(module.weight) for module in modules)
    if not can_pack or stack.config.head_dim > MAX_HEAD_DIM:
        return None
    return KernelDecoder(stack, rotary_table, library, dtype, release)


def gate_up_order(hidden: int) -> Tensor:
    """Return the rows of gate and up [2 * hidden], LANES of one and LANES of the other in turn; -1 after the last row of each."""
    gate = F.pad(torch.arange(hidden), (0, -hidden % LANES), value=-1).view(-1, LANES)
    return torch.stack((gate, torch.where(gate < 0, -1, gate + hidden)), 1).flatten()


def _heads_order(stack: Stack) -> Tensor:
    """Return the rows of queries, keys and values, with the channels of queries and keys in the stack's order."""
    config, rotated = stack.config, stack.config.heads + stack.config.num_kv_heads
    rows = torch.arange((rotated + config.num_kv_heads) * config.head_dim).view(-1, config.head_dim)
    return torch.cat((rows[:rotated, stack.qk_order], rows[rotated:])).flatten()


def _norm(weight: Tensor | None, dim: int) -> Tensor | None:
    """Return a norm's weight [dim], padded with zeros."""
    return None if weight is None else F.pad(weight.detach().float(), (0, -dim % K_ALIGN))


class KernelDrafter:
    """The layers of a `ParallelDrafter` besides its decoder; packed layers in 8 bits replace `DRAFTER_LAYERS`.

    head: the target's; None: the head is not linear, and C samples no chains. The logits of `combine` are a sum: the head's of the
    features, computed for all levels together, and `head_up`, the product of the head's weights with those of `up`, of the hidden
    values, which depend on the previous code.
    """

    def __init__(self, drafter: Any, head: KernelLinear | None, library: CDLL):
        self.library, self.head = library, head
        self.layers = layers = structs.DraftLayers(queries=drafter.queries.detach())
        for name in DRAFTER_LAYERS:
            layer = getattr(drafter, name)
            if not isinstance(layer, KernelLinear):
                layer = KernelLinear(library, [(layer.weight, layer.bias)], "int8")
                setattr(drafter, name, layer)
            setattr(layers, name, layer.struct)
        layers.query_count, layers.dim = drafter.queries.shape
        layers.aux = drafter.fc.in_features // layers.dim - 2
        layers.eps = drafter.config.decoder.norm_eps
        if head is None:
            return
        up, bias = drafter.up.weight, drafter.up.bias[:, None]  # [D, H] and [D, 1]
        # 8 bits are enough: a draft's rounding changes the codes that are offered, not the distribution of pictures.
        head_up = product(head.weight, up)
        head_up.int8_weight = quantised(head_up, 8)  # type: ignore[attr-defined]
        self.head_up = KernelLinear(library, [(head_up, product(head.weight, bias)[:, 0])], "int8")
        layers.head_up, layers.head = self.head_up.struct, head.struct

    def inputs(
        self, next_embeds: Tensor, features: Tensor, queries: int, hints: Tensor | None
    ) -> Tensor | None:
        """Compute the inputs of `DrafterKernels.inputs`."""
        if not computable(next_embeds):
            return None
        batch, known, dim = next_embeds.shape
        out = next_embeds.new_empty(batch, known + queries, dim)
        call = structs.QueryInputs(self.layers, batch, known, queries, stride=known, hints=hints, out=out)
        call.next_embeds, call.features = next_embeds, features
        call.run(self.library)
        return out

    def sample(self, draft: Draft, warp: Warping, **tensors: Any) -> bool:
        """Draw the codes of `DrafterKernels.sample`."""
        batch, levels, _ = tensors["features"].shape
        if self.head is None or not computable(tensors["features"]):
            return False
        call = structs.Chain(self.layers, batch, levels, self.head.struct.outputs, **tensors)
        call.sampling, call.probs, call.drawn = structs.Sampling(*warp), draft.probs, draft.codes
        call.run(self.library)
        return True


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] times b [k, m] in float32, of sums in float64: their rounding does not depend on the number of threads."""
    b = b.detach().double()
    return torch.cat([(rows.double() @ b).float() for rows in a.detach().split(4096)])


class PackedConvolution(nn.Conv2d):
    """A convolution on a CPU, for inference; its weights are reordered for the size of its first input."""

    packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in, H, W] -> [B, out, H', W']."""
        sizes = (*map(list, (self.padding, self.stride, self.dilation)), self.groups)
        if self.packed is None:
            reorder = torch.ops.mkldnn._reorder_convolution_weight
            self.packed = reorder(self.weight.detach(), *sizes, list(x.shape))
        return torch.ops.mkldnn._convolution_pointwise(x, self.packed, self.bias, *sizes, "none", [], "")


class SerialGroupNorm(nn.GroupNorm):
    """Group normalisation of x [B, C, H, W] by one thread, unless x is large.

    Where channels come last, PyTorch adds up the sums of its threads, so that the result depends on their number, which C sets
    for the calling thread; `torch.set_num_threads` would also set that of threads that begin meanwhile. Kernels without OpenMP
    cannot set PyTorch's number: then channels come first.
    """

    library: CDLL

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x."""
        if x.numel() > MAX_SERIAL:
            return super().forward(x)
        num_threads = self.library.use_threads(1)  # before the call; 0: the kernels have threads of their own
        if not num_threads:
            return super().forward(x.contiguous()).contiguous(memory_format=torch.channels_last)
        try:
            return super().forward(x)
        finally:
            self.library.use_threads(num_threads)


def supports(convolution: nn.Conv2d) -> bool:
    """Whether oneDNN has this convolution with prepacked weights, in the dtype of its weights on this CPU."""
    ops, dtype = torch.ops.mkldnn, convolution.weight.dtype
    if not torch.backends.mkldnn.is_available() or not hasattr(ops, "_convolution_pointwise"):
        return False
    if convolution.padding_mode != "zeros" or isinstance(convolution.padding, str):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and ops._is_mkldnn_bf16_supported())


def pack(module: nn.Module, library: CDLL | None, dtype: str = "bfloat16") -> None:
    """Replace the linear layers, convolutions and group norms below `module` by packed ones where possible, for inference.

    dtype: of the weights of a decoder's linear layers. library None: convolutions alone.
    """
    in_block = isinstance(module, Block)
    for name, child in cast("Iterable[tuple[str, Any]]", module.named_children()):
        kind, weight = type(child), getattr(child, "weight", None)
        on_cpu = isinstance(weight, Tensor) and weight.device.type == "cpu"
        if kind is nn.Linear and library is not None and packable(child.weight):
            order = gate_up_order(len(child.weight) // 2) if in_block and name == "w13" else None
            kept = dtype if in_block else "bfloat16"
            setattr(module, name, KernelLinear(library, [(child.weight, child.bias)], kept, order))
        elif kind is nn.Conv2d and on_cpu and supports(child):
            child.__class__ = PackedConvolution
        elif kind is nn.GroupNorm and on_cpu and library is not None:
            child.__class__, child.library = SerialGroupNorm, library
        else:
            pack(child, library, dtype)
    if library is not None and type(module) is Decoder:
        module.native = kernel_decoder(module.stack(), module.rotary_table, library, dtype)
