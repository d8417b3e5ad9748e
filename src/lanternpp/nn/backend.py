"""What computes for PyTorch where it can: one interface, and one line that names what implements it.

Everything that a backend does not compute is computed by PyTorch's own operations, which the callers have.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lanternpp.types import Draft, NeighbourBudget, Nodes, Verdict, Warping

BACKEND = (
    "lanternpp.kernels:in_use"  # what returns the backend; "lanternpp.nn.backend:Backend" is PyTorch alone
)

Weights = tuple[Tensor, Tensor | None]
"""Weight [out, in] and bias [out] of a linear layer."""

DecoderForward = Callable[[Tensor, Nodes, Tensor, tuple[int, ...]], Tensor]
"""`Decoder.forward` on a host: x [R, N, D], nodes, the cache's keys and values [L, 2, R, Hkv, S, d], aux_layers -> [R, N, (1 + aux) D]."""


class StackForward(Protocol):
    """A `DecoderForward` that has the table of its rotary embeddings, which may be replaced between passes."""

    rotary_table: Tensor

    def __call__(self, x: Tensor, nodes: Nodes, kv: Tensor, aux_layers: tuple[int, ...]) -> Tensor:
        """As `DecoderForward`."""
        ...


HeadLogits = Callable[[Tensor, float, int], Tensor | None]
"""Features [R, N, D], guidance scale, branches -> logits [B, N, V] float32 of a linear head, guided where there are two branches."""

SampleChain = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor, Warping, Draft, float], bool]
"""Draws the codes of a chain, each from the head of `QueryDrafter.combine` after the code before; they and their probs go to the draft.

features [B, levels, D], level_query [B, levels, H], prev_code_table [V, H], bias [B, levels, V] added to the logits or None, u
[B, levels] float64 uniform, warping, draft, min_survival. min_survival: above 0, survival is written too, and drawing ends where it is below this for
all B; the first code is always drawn. False where it drew nothing.
"""

VerifyDraft = Callable[
    [Draft, Tensor, Warping, NeighbourBudget, bool, Tensor, Tensor], tuple[Verdict, Tensor] | None
]
"""Draft, logits [B, N, V], warping, budget, tokenwise, u, last [B, 1] -> the verdict, and what was computed of the nodes.

u and last are uniform. tokenwise: as `engine.verify`, with u [B, levels, K]; else jointly, as block and traversal verification, with u
[B, 1].
"""


class DrafterInputs(Protocol):
    """What a parallel drafter's decoder reads, and the queries of its levels."""

    def takes(self, x: Tensor) -> bool:
        """Whether it computes those of embeddings or features x."""
        ...

    def __call__(self, next_embeds: Tensor, features: Tensor, queries: int, hints: Tensor | None) -> Tensor:
        """next_embeds [B, N, D], features [B, N, (1 + aux) D], hints [B, N + Q, D] -> the decoder's inputs, [B, N + Q, D]."""
        ...

    def level_query(self, features: Tensor) -> Tensor:
        """Features of levels [B, levels, D] -> [B, levels, H]."""
        ...


class Step(Protocol):
    """The steps of an engine, whole or in stages: draft, pass, verify, commit."""

    def run(self, first: int = 0, last: int = 3) -> None:
        """Stages `first` to `last` of a step."""
        ...


class Threads:
    """A context in which `update`, called often, may change PyTorch's number of threads for the calling thread; here it does not."""

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self) -> None:
        """Adapt to what else runs on this machine."""


class Backend:
    """The interface, and the backend that leaves everything to PyTorch. None: PyTorch is to compute it.

    What a method returns to be called later is called with tensors on a host; it returns None for those it does not compute.
    """

    name = "none"  # of the compiled variant; measured speeds hold for one name

    def gemm_dtype(self, like: Tensor) -> torch.dtype:
        """The dtype that products of tensors like this are fastest in."""
        return like.dtype

    def serves(self, weights: int) -> bool:
        """Whether it computes bfloat16 decoders of so many weights, also where the CPU has no products of bfloat16."""
        return False

    def pack(self, module: nn.Module, int8: bool = False) -> None:
        """Repack the weights below `module` for few rows; it is for inference from then on. A `Decoder` gets its `native` forward.

        int8: those of linear layers may be stored in 8 bits.
        """

    def decoder(
        self, stack: Any, rotary_table: Tensor, dtype: str, release: bool = False
    ) -> StackForward | None:
        """The passes of a `Stack`, from a copy of its weights in `dtype`: "bfloat16", or "int8" with a scale for each output.

        release: free the weights of every layer as soon as they are copied. rotary_table [positions, 2, head_dim] float32, in the order of the stack's `qk_order`.
        """
        return None

    def packs_blocks(self, like: Tensor) -> bool:
        """Whether `pack` takes the blocks of a decoder one at a time, in 8 bits too, with weights of the dtype and device of `like`."""
        return False

    def head(self, layer: nn.Module | None) -> HeadLogits | None:
        """The logits of a linear head; layer None: it is another function."""
        return None

    def chain(
        self, up: nn.Module, confidence: nn.Module | None, head: nn.Module | None, logits: HeadLogits | None
    ) -> SampleChain | None:
        """The chains of a parallel drafter with these linear layers, for a target's head; logits: what `head` made of that."""
        return None

    def probs(self, logits: Tensor, warp: Warping) -> Tensor | None:
        """As `Sampling.probs`: logits [..., V] -> probabilities [..., V]."""
        return None

    def children(self, q: Tensor, u: Tensor | None, count: int) -> Tensor | None:
        """q [..., V] -> the first `count` different codes drawn at u [..., M] uniform; without u the likeliest, [..., count]."""
        return None

    def drafter_inputs(
        self, fc: nn.Module, hint: nn.Module, down: nn.Module, queries: Tensor, eps: float
    ) -> DrafterInputs | None:
        """The layers of a parallel drafter around its decoder; queries [count, D]; eps: of the norm of aux features."""
        return None

    def step(self, engine: Any, verify: str) -> Step | None:
        """Whole steps of a new `Engine`, the same bits as by parts; verify: the name of its verifier."""
        return None

    def verifier(self) -> VerifyDraft | None:
        """Verification of drafts, for one engine."""
        return None

    def threads(self, decoder: nn.Module) -> Threads:
        """The threads of a drawing thread that runs this decoder."""
        return Threads()


PYTORCH = Backend()


def backend() -> Backend:
    """The backend in use."""
    module, _, name = BACKEND.partition(":")
    found: Backend = getattr(import_module(module), name)()
    return found
