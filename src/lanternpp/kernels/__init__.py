"""All that knows of C: the sources, their binding, packed weights, threads."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.kernels import packed
from lanternpp.kernels.chain import native_chain, native_inputs
from lanternpp.kernels.decoder import KernelDecoder, unserved
from lanternpp.kernels.linear import NativeHead, native_head, packable
from lanternpp.kernels.loading import kernels
from lanternpp.kernels.sampling import NativeSampling, NativeVerifier
from lanternpp.kernels.threads import AdaptiveThreads
from lanternpp.nn.backend import (
    Backend,
    DrafterInputs,
    HeadLogits,
    SampleChain,
    StackForward,
    Step,
    Threads,
    VerifyDraft,
    Weights,
)
from lanternpp.nn.stack import Stack


class Kernels(Backend):
    """The kernels in C, and weights packed for oneDNN's products where it has those; without a library the latter alone."""

    def __init__(self, library: ctypes.CDLL | None):
        self.library = library
        self.name = "none" if library is None else Path(library._name).stem
        self.sampling = None if library is None else NativeSampling(library)

    def gemm_dtype(self, like: Tensor) -> torch.dtype:
        """float32 where the CPU has no products of bfloat16."""
        host = like.device.type == "cpu" and like.dtype == torch.bfloat16
        return (
            torch.float32 if host and self.library is not None and self.library.gemm_is_fp32() else like.dtype
        )

    def serves(self, weights: int) -> bool:
        """Of any size."""
        return self.library is not None

    def pack(self, module: nn.Module, int8: bool = False) -> None:
        """Linear layers, convolutions, group norms and decoders that can be; the last alone in 8 bits."""
        packed.pack(module, self.library, int8)

    def packs_blocks(self, like: Tensor) -> bool:
        """bfloat16 on a CPU."""
        return self.library is not None and packable(like)

    def decoder(
        self, stack: Stack, rotary_table: Tensor, dtype: str, release: bool = False
    ) -> StackForward | None:
        """bfloat16 on a CPU."""
        if self.library is None or unserved(stack) is not None:
            return None
        return KernelDecoder(stack, rotary_table, self.library, dtype == "int8", release)

    def head(self, layer: nn.Module | None) -> HeadLogits | None:
        """bfloat16 on a CPU."""
        return native_head(layer)

    def chain(
        self, up: nn.Module, confidence: nn.Module | None, head: nn.Module | None, logits: HeadLogits | None
    ) -> SampleChain | None:
        """bfloat16 on a CPU."""
        weights = _weights(up)
        shared = logits.packed if isinstance(logits, NativeHead) else None
        return (
            None if weights is None else native_chain(weights, _weights(head), _weights(confidence), shared)
        )

    def drafter_inputs(
        self, fc: nn.Module, hint: nn.Module, down: nn.Module, queries: Tensor, eps: float
    ) -> DrafterInputs | None:
        """bfloat16 on a CPU."""
        weights = [_weights(layer) for layer in (fc, hint, down)]
        known = [each for each in weights if each is not None]
        return native_inputs(known[0], known[1], known[2], queries, eps) if len(known) == 3 else None

    def step(self, engine: Any, verify: str) -> Step | None:
        """Plain decoding and chains of a parallel drafter, as `fused_step` says."""
        from lanternpp.kernels.step import fused_step  # the engine is loaded where one is made

        return None if self.library is None else fused_step(engine, verify)

    def probs(self, logits: Tensor, warp: tuple[float, int, float]) -> Tensor | None:
        """float32 on a CPU."""
        return None if self.sampling is None else self.sampling.probs(logits, warp)

    def children(self, q: Tensor, u: Tensor | None, count: int) -> Tensor | None:
        """float32 on a CPU."""
        return None if self.sampling is None else self.sampling.children(q, u, count)

    def verifier(self) -> VerifyDraft | None:
        """float32 on a CPU."""
        return None if self.library is None else NativeVerifier(self.library)

    def threads(self, decoder: nn.Module) -> Threads:
        """Fewer while other work wants the cores, for decoders whose passes are computed in C."""
        return AdaptiveThreads(decoder)


def _weights(layer: nn.Module | None) -> Weights | None:
    return None if layer is None else (layer.weight, layer.bias)  # type: ignore[return-value]


def in_use() -> Backend:
    """The kernels as the machine and LANTERNPP_KERNELS allow them."""
    return _with(kernels())


@cache
def _with(library: ctypes.CDLL | None) -> Kernels:
    return Kernels(library)
