"""Networks for inference on a CPU: passes of decoders (`csrc/decoder.c`) and of the layers around a parallel drafter's own
(`chain.c`, `step.c`), linear layers, convolutions with weights prepacked for oneDNN, group norms.

oneDNN reorders a convolution's weights at every call, a third of the time of the tokenizer's decoder; here they are reordered once.
The results of the group norms do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from ctypes import CDLL, c_int64
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.kernels.binding import BLOCK_N, K_ALIGN, LANES, own, structs
from lanternpp.kernels.linear import PAGES, KernelLinear, packable, takes
from lanternpp.nn.checkpoints import quantised
from lanternpp.nn.decoder import Block, Decoder, Stack, StackLayer
from lanternpp.types import Draft, Nodes, Warping

QK_KINDS, GATES = ("none", "rms", "layer"), ("silu", "gelu_tanh")
SAME = ("dim", "heads", "kv_heads", "head_dim", "eps", "qk_eps")  # in `Stack` and `Shape`
MAX_HEAD = 512
AROUND = ("fc", "hint", "down")  # layers of a drafter before and after its decoder
MOST_SERIAL = 1 << 20  # values of an input that one thread normalises; larger ones gain from more threads


class KernelDecoder:
    """The passes of a stack. Its linear layers are packed, in 8 bits or in bfloat16; the stack's are not kept.

    rotary_table: [positions, 2, head_dim], in the stack's `qk_order`. release: free the weights of every layer as soon as they
    are packed. `packed`: the four products of every layer, by their names in C.
    """

    def __init__(self, stack: Stack, rotary_table: Tensor, library: CDLL, int8: bool, release: bool = False):
        self.library, self.int8, self.rotary_table = library, int8, rotary_table.float().contiguous()
        self.packed: list[dict[str, KernelLinear]] = []
        self.embeddings: Tensor | None = None  # of all codes, once a step has read them
        layers = []
        for layer in stack.layers:
            products = {
                "wqkv": self._linear(layer.qkv, _heads_order(stack)),
                "wo": self._linear([layer.out]),
                "w13": self._linear(layer.gate_up, gate_up_order(stack.hidden)),
                "w2": self._linear([layer.down]),
            }
            norms = ("attention_norm", "ffn_norm", "attention_out_norm", "ffn_out_norm")
            fields = {name: _norm(getattr(layer, name), stack.dim) for name in norms}
            fields |= zip(("qk_norm", "qk_bias"), _head_scales(stack, layer), strict=True)
            fields |= {name: product.struct for name, product in products.items()}
            layers.append(structs.Layer(**fields))
            self.packed.append(products)
            for module in linear_layers(layer) if release else ():
                module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
        self.layers, self._kept = (structs.Layer * len(layers))(*layers), layers
        same = {name: getattr(stack, name) for name in SAME}
        self.shape = structs.Shape(len(layers), **same, norm=_norm(stack.norm, stack.dim))
        self.shape.qk_kind, self.shape.gate_kind = QK_KINDS.index(stack.qk_norm), GATES.index(stack.gate)
        self.shape.scale = stack.head_dim**-0.5 if stack.scale is None else stack.scale

    def use_threads(self, count: int) -> None:
        """Compute with so many threads from now on, in PyTorch too where they are its own, but in the calling thread alone."""
        self.library.use_threads(count)
        own.threads = count if torch.get_num_threads() != count else 0

    def __call__(self, x: Tensor, nodes: Nodes, kv: Tensor, aux_layers: tuple[int, ...] = ()) -> Tensor:
        """As `DecoderForward`, with keys and values [L, 2, R, Hkv, S, head_dim up to a multiple of 32].

        InputError unless inputs, keys and values are bfloat16.
        """
        if not (takes(x) and takes(kv)):
            raise InputError(
                f"the kernels compute in bfloat16, and this model's embeddings are {x.dtype}; use model.to(torch.bfloat16)"
            )
        rows, count, parts = *x.shape[:2], 1 + len(aux_layers)
        out = x.new_empty(rows, count, parts * self.shape.dim)
        rotation = self.rotary_table[nodes.position.clamp(max=len(self.rotary_table) - 1)]
        sizes = self.shape, self.layers, rows, count, kv.shape[4]
        tensors = x, rotation, nodes.slot, nodes.mask, kv, out
        structs.Pass(*sizes, *tensors, parts, self.part(aux_layers)).run(self.library)
        return out

    def part(self, aux_layers: tuple[int, ...]) -> Any:
        """Of every layer the part of a pass's outputs that its output is; 0: none."""
        count = self.shape.layers
        return (c_int64 * count)(*(aux_layers.index(i) + 1 if i in aux_layers else 0 for i in range(count)))

    def _linear(self, modules: Sequence[Any], order: Tensor | None = None) -> KernelLinear:
        packed = modules[0] if isinstance(modules[0], KernelLinear) else None
        return packed or KernelLinear(self.library, [(x.weight, x.bias) for x in modules], self.int8, order)


def linear_layers(layer: StackLayer) -> tuple[Any, ...]:
    """The modules of a layer's four products."""
    return *layer.qkv, layer.out, *layer.gate_up, layer.down


def kernel_decoder(
    stack: Stack, rotary_table: Tensor, library: CDLL, int8: bool, release: bool = False
) -> KernelDecoder | None:
    """As `KernelDecoder`; None where the kernels do not compute the stack."""
    fits = stack.head_dim <= MAX_HEAD and stack.head_dim % 2 == 0
    linear = (module for layer in stack.layers for module in linear_layers(layer))
    if not fits or not all(isinstance(x, KernelLinear) or packable(x.weight) for x in linear):
        return None
    return KernelDecoder(stack, rotary_table, library, int8, release)


def gate_up_order(hidden: int) -> Tensor:
    """The rows of gate and up [2 * hidden], alternating by LANES, -1 after the last of each."""
    padded = F.pad(torch.arange(hidden), (0, -hidden % LANES), value=-1).view(-1, LANES)
    return torch.stack((padded, torch.where(padded < 0, -1, padded + hidden)), 1).flatten()


def _heads_order(stack: Stack) -> Tensor | None:
    """The rows of queries, keys and values, with channels of a head in the stack's order; None: as they are."""
    if stack.qk_order is None:
        return None
    rotated = stack.heads + stack.kv_heads
    rows = torch.arange((rotated + stack.kv_heads) * stack.head_dim).view(-1, stack.head_dim)
    return torch.cat((rows[:rotated, stack.qk_order], rows[rotated:])).flatten()


def _head_scales(stack: Stack, layer: StackLayer) -> Iterator[Tensor | None]:
    """Weight and bias of the norms of queries and keys, [heads + kv_heads, d], in the stack's order."""
    order = slice(None) if stack.qk_order is None else stack.qk_order
    for q, k in zip(layer.q_norm or (None, None), layer.k_norm or (None, None), strict=True):
        yield None if q is None or k is None else PAGES.put(torch.cat((q, k)).detach().float()[:, order])


def _norm(weight: Tensor | None, dim: int) -> Tensor | None:
    """A norm's weight [dim], padded with zeros."""
    return None if weight is None else PAGES.put(F.pad(weight.detach().float(), (0, -dim % K_ALIGN)))


class KernelDrafter:
    """The layers of a `ParallelDrafter` besides its decoder; some are replaced by packed ones in 8 bits.

    head: of the target; None: it is not linear, and chains are not sampled here. The head's logits of `combine` are those of the
    features, which are computed for all levels together, and `head_up`, the product of the head's weights with those of `up`, times
    what is known of the code before.
    """

    def __init__(self, drafter: Any, head: KernelLinear | None, library: CDLL):
        self.library, self.head = library, head
        for name in AROUND:
            layer = getattr(drafter, name)
            if not isinstance(layer, KernelLinear):
                setattr(drafter, name, KernelLinear(library, [(layer.weight, layer.bias)], int8=True))
        count, dim = drafter.queries.shape
        around = {name: getattr(drafter, name).struct for name in AROUND}
        self.layers = layers = structs.DraftLayers(**around, queries=drafter.queries.detach())
        layers.query_count, layers.dim, layers.aux = count, dim, drafter.fc.in_features // dim - 2
        layers.eps = drafter.config.decoder.norm_eps
        if head is None:
            return
        up, bias = drafter.up.weight, drafter.up.bias[:, None]
        # In 8 bits: a draft's rounding changes what is offered, not the distribution of pictures.
        head_up = product(head.weight, up)
        head_up.int8_weight = quantised(head_up, 8)  # type: ignore[attr-defined]
        self.head_up = KernelLinear(library, [(head_up, product(head.weight, bias)[:, 0])], int8=True)
        layers.head_up, layers.head = self.head_up.struct, head.struct
        if (confidence := drafter.confidence) is not None:
            layers.confidence_bias, layers.confidence = float(confidence.bias), confidence.weight.detach()
            layers.confidence_up = product(confidence.weight, torch.cat((up, bias), 1))

    def inputs(
        self, next_embeds: Tensor, features: Tensor, queries: int, hints: Tensor | None
    ) -> Tensor | None:
        """As `DrafterKernels.inputs`."""
        if not takes(next_embeds):
            return None
        batch, known, dim = next_embeds.shape
        out = next_embeds.new_empty(batch, known + queries, dim)
        sizes = self.layers, batch, known, queries, known
        structs.QueryInputs(*sizes, next_embeds, features, hints, out).run(self.library)
        return out

    def sample(self, draft: Draft, warp: Warping, min_survival: float = 0.0, **tensors: Any) -> bool:
        """As `DrafterKernels.sample`."""
        batch, levels, _ = tensors["features"].shape
        if self.head is None or not takes(tensors["features"]):
            return False
        sizes = self.layers, batch, levels, self.head.struct.outputs, structs.Sampling(*warp)
        work = structs.Chain(*sizes, **tensors, min_survival=min_survival)
        work.probs, work.drawn, work.survival = draft.probs, draft.codes, draft.survival
        work.run(self.library)
        return True


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] times b [k, m] in float32, of sums in float64: their rounding does not depend on the number of threads."""
    b = b.detach().double()
    return torch.cat([(rows.double() @ b).float() for rows in a.detach().split(4096)])


def kernel_drafter(drafter: Any, head: KernelLinear | None, library: CDLL) -> KernelDrafter | None:
    """As `KernelDrafter`; None where the weights do not allow it: they are to be bfloat16 on a CPU, in blocks."""
    weights, (dim, hidden) = [getattr(drafter, x).weight for x in (*AROUND, "up")], drafter.up.weight.shape
    odd = dim % BLOCK_N or hidden % LANES or not all(map(packable, weights))
    return None if odd else KernelDrafter(drafter, head, library)


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
    `torch.set_num_threads` would also set the number of those threads that begin meanwhile. Kernels without OpenMP have
    threads of their own, and then channels come first here.
    """

    library: CDLL

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x."""
        before = self.library.use_threads(1) if x.numel() <= MOST_SERIAL else -1
        try:
            if before:
                return super().forward(x)
            return super().forward(x.contiguous()).contiguous(memory_format=torch.channels_last)
        finally:
            if before > 0:
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
