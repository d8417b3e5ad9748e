"""All that knows of C: the sources, their binding, packed weights."""

from __future__ import annotations

from ctypes import CDLL
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.kernels.binding import structs
from lanternpp.kernels.linear import KernelLinear, packable
from lanternpp.kernels.loading import kernels
from lanternpp.kernels.packing import KernelDecoder, KernelDrafter, kernel_decoder, kernel_drafter, pack
from lanternpp.kernels.step import KernelStep, fused_step, verification
from lanternpp.nn.backend import Backend, HeadLogits
from lanternpp.nn.decoder import Stack
from lanternpp.types import Draft, NeighbourBudget, Verdict, Warping, on_host


class OneDNN(Backend):
    """Convolutions with packed weights, where there are no kernels."""

    def pack(self, module: nn.Module, int8: bool = False) -> None:
        """Convolutions alone."""
        pack(module, None)


class Kernels(Backend):
    """The kernels in C, and convolutions with packed weights. They compute on a CPU: passes in bfloat16, sampling in float32."""

    def __init__(self, library: CDLL):
        self.library, self.name = library, Path(library._name).stem

    def gemm_dtype(self, like: Tensor) -> torch.dtype:
        """float32 where the CPU has no products of bfloat16."""
        return torch.float32 if self.packs(like) and self.library.number_of(b"gemm is fp32") else like.dtype

    def packs(self, like: Tensor) -> bool:
        """bfloat16 on a CPU."""
        return packable(like)

    def pack(self, module: nn.Module, int8: bool = False) -> None:
        """Linear layers, convolutions, group norms and decoders; the last alone in 8 bits."""
        pack(module, self.library, int8)

    def decoder(
        self, stack: Stack, rotary_table: Tensor, dtype: str, release: bool = False
    ) -> KernelDecoder | None:
        """bfloat16 on a CPU."""
        return kernel_decoder(stack, rotary_table, self.library, dtype == "int8", release)

    def head(self, layer: nn.Module | None) -> HeadLogits | None:
        """bfloat16 on a CPU."""
        if isinstance(layer, nn.Linear) and packable(layer.weight):
            layer = KernelLinear(self.library, [(layer.weight, layer.bias)])
        return layer.logits if isinstance(layer, KernelLinear) else None

    def drafter(self, drafter: Any, target: Any) -> KernelDrafter | None:
        """bfloat16 on a CPU."""
        logits: Any = target.native_head or self.head(target.head_linear)
        return kernel_drafter(drafter, logits and logits.__self__, self.library)

    def step(self, engine: Any, verify: str) -> KernelStep | None:
        """Plain decoding and chains of a parallel drafter, as `fused_step` says."""
        return fused_step(engine, verify)

    def probs(self, logits: Tensor, warp: Warping) -> Tensor | None:
        """float32 on a CPU."""
        if not _in_float32(logits):
            return None
        out, vocab = torch.empty_like(logits, dtype=torch.float32), logits.shape[-1]
        structs.Rows(logits.numel() // vocab, vocab, structs.Sampling(*warp), logits, out).run(self.library)
        return out

    def children(self, q: Tensor, u: Tensor | None, count: int) -> Tensor | None:
        """float32 on a CPU."""
        if not _in_float32(q):
            return None
        out, vocab = torch.empty(*q.shape[:-1], count, dtype=torch.int64), q.shape[-1]
        each = 0 if u is None else u.shape[-1]
        structs.Children(q.numel() // vocab, vocab, each, count, q, u, out).run(self.library)
        return out

    def verify(
        self, draft: Draft, logits: Tensor, warp: Warping, budget: NeighbourBudget, u: Tensor, last: Tensor
    ) -> Verdict | None:
        """float32 on a CPU."""
        if not _in_float32(logits):
            return None
        q = None if draft.probs is None else draft.probs.to(logits.dtype)
        if draft.codes.shape != logits.shape[:2] or (q is not None and q.shape != logits.shape):
            have = f"codes {list(draft.codes.shape)}" + ("" if q is None else f" and probs {list(q.shape)}")
            raise InputError(f"a draft has {have} for logits {list(logits.shape)}; each node needs its own")
        given = {"q": q, "drawn": draft.codes, "u": u, "last": last}
        work = verification(draft.tree, logits, warp, budget, u.ndim == 2, **given)
        work.run(self.library)
        path, kept, following, bonus = (work.alive[name] for name in ("path", "kept", "following", "bonus"))
        return Verdict(path, kept, following, bonus, distribution=work.alive.get("distribution"))


def _in_float32(x: Tensor) -> bool:
    return x.dtype == torch.float32 and on_host(x)


def in_use() -> Backend:
    """The kernels as the machine and LANTERNPP_KERNELS allow them."""
    library = kernels()
    return OneDNN() if library is None else Kernels(library)
