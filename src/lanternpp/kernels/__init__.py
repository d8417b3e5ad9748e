"""The kernels in C: sources, compiled libraries, their binding and packed weights."""

from __future__ import annotations

from ctypes import CDLL
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.kernels.binding import BLOCK_N, LANES, structs
from lanternpp.kernels.linear import KernelLinear, computable, packable
from lanternpp.kernels.loading import kernels
from lanternpp.kernels.packing import DRAFTER_LAYERS, KernelDecoder, KernelDrafter, kernel_decoder, pack
from lanternpp.kernels.step import fused_step, verification
from lanternpp.nn.backend import Backend, HeadLogits
from lanternpp.nn.decoder import Stack
from lanternpp.types import Draft, NeighbourBudget, Verdict, Warping


class OneDNN(Backend):
    """Convolutions with packed weights, where there are no kernels."""

    def pack(self, module: nn.Module, dtype: str = "bfloat16") -> None:
        """Pack convolutions alone."""
        pack(module, None)


class Kernels(Backend):
    """The kernels in C, and packed convolutions: passes in bfloat16, sampling in float32, on a CPU; None for other tensors."""

    packs, step = staticmethod(packable), staticmethod(fused_step)

    def __init__(self, library: CDLL):
        self.library, self.name = library, Path(library._name).stem

    def gemm_dtype(self, like: Tensor) -> torch.dtype:
        """Return float32 for tensors in bfloat16 where the CPU has no products of bfloat16."""
        return torch.float32 if self.packs(like) and self.library.number_of(b"gemm is fp32") else like.dtype

    def pack(self, module: nn.Module, dtype: str = "bfloat16") -> None:
        """Pack linear layers, convolutions, group norms and decoders; decoders alone can have 8 or 4 bits."""
        pack(module, self.library, dtype)

    def decoder(
        self, stack: Stack, rotary_table: Tensor, dtype: str, release: bool = False
    ) -> KernelDecoder | None:
        """Return the passes of a stack with weights in `dtype`."""
        return kernel_decoder(stack, rotary_table, self.library, dtype, release)

    def head(self, layer: nn.Module | None) -> HeadLogits | None:
        """Return the logits of a linear head with weights in bfloat16."""
        if isinstance(layer, nn.Linear) and packable(layer.weight):
            layer = KernelLinear(self.library, [(layer.weight, layer.bias)])
        return layer.logits if isinstance(layer, KernelLinear) else None

    def drafter(self, drafter: Any, target: Any) -> KernelDrafter | None:
        """Return the layers of a parallel drafter besides its decoder, with weights in bfloat16 and sizes in blocks."""
        dim, hidden = drafter.up.weight.shape
        weights = [getattr(drafter, name).weight for name in (*DRAFTER_LAYERS, "up")]
        if dim % BLOCK_N or hidden % LANES or not all(map(packable, weights)):
            return None
        logits: Any = target.native_head or self.head(target.head_linear)  # a method of a `KernelLinear`
        return KernelDrafter(drafter, None if logits is None else logits.__self__, self.library)

    def probs(self, logits: Tensor, warp: Warping) -> Tensor | None:
        """Return the probabilities [..., V] of logits [..., V] in float32."""
        if not computable(logits, torch.float32):
            return None
        out, vocab = torch.empty_like(logits), logits.shape[-1]
        structs.Rows(logits.numel() // vocab, vocab, structs.Sampling(*warp), logits, out).run(self.library)
        return out

    def children(self, q: Tensor, u: Tensor | None, count: int) -> Tensor | None:
        """Draw `count` different codes of every row of q [..., V] in float32."""
        if not computable(q, torch.float32):
            return None
        out, vocab = torch.empty(*q.shape[:-1], count, dtype=torch.int64), q.shape[-1]
        draws = 0 if u is None else u.shape[-1]
        structs.Children(q.numel() // vocab, vocab, draws, count, q, u, out).run(self.library)
        return out

    def verify(
        self, draft: Draft, logits: Tensor, warp: Warping, budget: NeighbourBudget, u: Tensor, last: Tensor
    ) -> Verdict | None:
        """Return the verdict for logits in float32; InputError where the draft's shapes do not fit them."""
        if not computable(logits, torch.float32):
            return None
        q = None if draft.probs is None else draft.probs.to(logits.dtype)
        if draft.codes.shape != logits.shape[:2] or (q is not None and q.shape != logits.shape):
            shapes = f"codes {list(draft.codes.shape)}" + ("" if q is None else f" and probs {list(q.shape)}")
            raise InputError(f"a draft has {shapes} for logits {list(logits.shape)}; each node needs its own")
        inputs = {"q": q, "drawn": draft.codes, "u": u, "last": last}
        call = verification(draft.tree, logits, warp, budget, u.ndim == 2, **inputs)
        call.run(self.library)
        path, kept, following, bonus = (call.alive[name] for name in ("path", "kept", "following", "bonus"))
        return Verdict(path, kept, following, bonus, distribution=call.alive.get("distribution"))


def in_use() -> Backend:
    """Return the kernels where the machine and LANTERNPP_KERNELS allow them."""
    library = kernels()
    return OneDNN() if library is None else Kernels(library)
