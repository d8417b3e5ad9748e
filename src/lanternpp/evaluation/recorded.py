"""The operations of one step of an engine: those of the target's decoder, to be timed alone, and the work of all products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lanternpp.engine.decode import Engine
from lanternpp.engine.stopwatch import elapsed
from lanternpp.nn.draws import NativeChain
from lanternpp.nn.int8 import stored
from lanternpp.nn.native import NativeDecoder, product_dtype
from lanternpp.nn.packed import NativeLinear
from lanternpp.nn.trees import NativeHead

LINEARS, ATTENTION, OTHERS = "linears", "attention", "others"
FUSED = "scaled_dot_product_attention"
WITH_SUM = ("addmm", "baddbmm")  # products whose first argument is added to them
PRODUCTS = frozenset({"matmul", "mm", "bmm", *WITH_SUM, FUSED})
Call = partial[object]


class RecordedStep(TorchFunctionMode):
    """One step of an engine that is not compiled.

    calls: of torch's functions in the target's decoder, in order, by part: linear layers, attention's products and its
    softmax, and the others (norms, rotations, activations, sums, the writing of keys and values, views); none of the
    others where passes are computed in C: the step is recorded as PyTorch would compute it. bytes and
    flops: those of all matrix products of the step, head and drafter among them. `bytes` are those of the operands as
    they are stored and of the results, each counted once per product; `flops` are 2 for a multiplication and its sum.

    The calls hold the weights and the cache themselves. Of tensors made in the decoder they hold the first of each shape
    and layout in place of all, as their values do not change the time, and a step too has freed those of one layer
    before the next.
    """

    def __init__(self, engine: Engine):
        super().__init__()
        self.calls: dict[str, list[Call]] = {LINEARS: [], ATTENTION: [], OTHERS: []}
        self.bytes = self.flops = 0
        self.rows = 0  # of the decoder's pass: branches x samples x nodes
        self._inside = False
        self._storages: dict[int, bool] = {}  # by address: whether it was made in the decoder
        self._stand_ins: dict[object, Tensor] = {}
        self._computed: dict[int, tuple[Tensor, Tensor]] = {}  # by id: as recorded, and as computed
        decoder = engine.target.decoder
        hooks = (decoder.register_forward_pre_hook(self._enter), decoder.register_forward_hook(self._leave))
        for layer in decoder.modules():
            if isinstance(layer, NativeLinear):
                # Unpacked now: made during the step, it would be taken for an intermediate result.
                _ = layer.weight
        try:
            NativeDecoder.active = NativeChain.active = NativeHead.active = False
            with self:
                engine.step()
        finally:
            NativeDecoder.active = NativeChain.active = NativeHead.active = True
            for hook in hooks:
                hook.remove()
        if decoder.native is not None:
            self.calls[OTHERS] = []  # a pass in C has none of them
            self.calls = {
                part: [self._as_computed(call) for call in calls] for part, calls in self.calls.items()
            }

    def _enter(self, *_: object) -> None:
        self._inside = True

    def _leave(self, decoder: object, args: object, features: Tensor) -> None:
        self._inside = False
        self.rows = features.shape[:-1].numel()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, and note it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        linear, product = "linear" in name, name in PRODUCTS
        if linear or product:
            self.flops += flops(name, args, out)
            self.bytes += sum(stored(x) for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor))
        if self._inside:
            part = LINEARS if linear else ATTENTION if product or name == "softmax" else OTHERS
            args, kwargs = tree_map_only(Tensor, self._stand_in, (args, kwargs))
            tree_map_only(Tensor, lambda x: self._made_here(x, True), out)
            self.calls[part].append(partial(func, *args, **kwargs))
        return out

    def _as_computed(self, call: Call) -> Call:
        """The same call of tensors in the dtype that the kernels in C compute in; each tensor is converted once."""

        def computed(x: Tensor) -> Tensor:
            return self._computed.setdefault(id(x), (x, x.to(product_dtype(x))))[1]

        args, kwargs = tree_map_only(Tensor, computed, (call.args, call.keywords))
        return partial(call.func, *args, **kwargs)

    def _made_here(self, x: Tensor, made: bool) -> bool:
        """Whether a plain tensor's memory was made in the decoder; made: whether it was, where it is seen first here."""
        plain = type(x) is Tensor and x.layout == torch.strided
        return plain and self._storages.setdefault(x.untyped_storage().data_ptr(), made)

    def _stand_in(self, x: Tensor) -> Tensor:
        """An argument, or the first tensor like it where it was made in the decoder."""
        if not self._made_here(x, False):
            return x
        return self._stand_ins.setdefault((x.shape, x.stride(), x.dtype), x)


def flops(name: str, args: Sequence[Any], out: Tensor) -> int:
    """Floating-point operations of a product, two for every multiplication and its sum."""
    if name == FUSED:
        return 2 * args[1].shape[-2] * (args[0].numel() + out.numel())
    return 2 * args[name in WITH_SUM].shape[-1] * out.numel()


class Replay:
    """Recorded calls that are timed alone; on a GPU as one CUDA graph, in which nothing waits for the host."""

    def __init__(self, calls: Sequence[Call], device: torch.device):
        self.calls, self.device = calls, device
        self._run: Callable[[], object] = self._all
        self._all()
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._all()
            self._run = graph.replay

    def seconds(self) -> float:
        """Seconds of all calls, once."""
        return elapsed(self._run, self.device)

    @torch.inference_mode()
    def _all(self) -> None:
        for call in self.calls:
            call()
