"""The interface of a backend, which computes in place of PyTorch where it can; one line names the implementation.

Callers have PyTorch's own operations for everything that a backend does not compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lanternpp.types import Draft, NeighbourBudget, Nodes, Verdict, Warping
from lanternpp.util.registry import imported

# Of a decoder's linear layers, packed in a dtype, with scales.
BYTES_PER_WEIGHT = {"bfloat16": 2.0, "int8": 1.01, "int4": 0.54}
BACKEND = "lanternpp.kernels:in_use"  # a function that returns the backend; "lanternpp.nn.backend:Backend" is PyTorch alone


class DecoderForward(Protocol):
    """`Decoder.forward` on a host. The table of its rotary embeddings may be replaced between passes."""

    rotary_table: Tensor

    def __call__(self, x: Tensor, nodes: Nodes, kv: Tensor, aux_layers: tuple[int, ...]) -> Tensor:
        """x [R, N, D], keys and values of a cache [L, 2, R, Hkv, S, d] -> [R, N, (1 + aux) D]."""
        ...


HeadLogits = Callable[[Tensor, float, int], Tensor | None]
"""Features [R, N, D], guidance scale, branches -> logits [B, N, V] float32 of a linear head, guided where there are two branches."""


class DrafterKernels(Protocol):
    """A parallel drafter's layers before and after its decoder."""

    def inputs(
        self, next_embeds: Tensor, features: Tensor, queries: int, hints: Tensor | None
    ) -> Tensor | None:
        """next_embeds [B, N, D], features [B, N, (1 + aux) D], hints [B, N + Q, D] -> the decoder's inputs, [B, N + Q, D]."""
        ...

    def sample(self, draft: Draft, warp: Warping, **tensors: Tensor | None) -> bool:
        """Draw the codes of a chain, each from the head of `ParallelDrafter.combine` after the previous code; False: none is drawn.

        tensors: features [B, levels, D], query [B, levels, H], prev [V, H] of every previous code, bias [B, levels, V] float32
        added to the logits or None, u [B, levels] float64 uniform. Codes and their probs are written to the draft.
        """
        ...


class Step(Protocol):
    """The steps of an engine, complete or in stages: draft, pass, verify, commit."""

    def run(self, first: int = 0, last: int = 3) -> None:
        """Run stages `first` to `last` of a step."""
        ...


class Backend:
    """The interface, and the backend that leaves everything to PyTorch. A method returns None where PyTorch is to compute."""

    name = "none"  # of the compiled variant; measured speeds hold for one name

    def gemm_dtype(self, like: Tensor) -> torch.dtype:
        """Return the dtype in which products of tensors with the dtype and device of `like` are fastest."""
        return like.dtype

    def packs(self, like: Tensor) -> bool:
        """Whether `pack` takes the blocks of a decoder one at a time, in 8 and 4 bits too, with weights of the dtype and device of `like`."""
        return False

    def pack(self, module: nn.Module, dtype: str = "bfloat16") -> None:
        """Prepack the weights below `module`, for inference; a `Decoder` gets its `native` forward.

        dtype: of the weights of a decoder's linear layers, as `decoder` has it.
        """

    def decoder(
        self, stack: Any, rotary_table: Tensor, dtype: str, release: bool = False
    ) -> DecoderForward | None:
        """Return the passes of a `Stack`, with copies of its weights in `dtype`, a name of `BYTES_PER_WEIGHT`.

        "int8" has a scale for each output, "int4" such a scale times a whole number for every 32 inputs of an output.

        rotary_table: [positions, 2, head_dim] float32, in the stack's `qk_order`. release: free a layer's weights once copied.
        """
        return None

    def head(self, layer: nn.Module | None) -> HeadLogits | None:
        """Return the logits of a linear head; layer None: the head is another function."""
        return None

    def drafter(self, drafter: Any, target: Any) -> DrafterKernels | None:
        """Return the layers of a `ParallelDrafter` besides its decoder, for the head of a target; some may be repacked."""
        return None

    def probs(self, logits: Tensor, warp: Warping) -> Tensor | None:
        """Compute `Sampling.probs`: logits [..., V] -> probabilities [..., V]."""
        return None

    def children(self, q: Tensor, u: Tensor | None, count: int) -> Tensor | None:
        """q [..., V] -> the first `count` different codes drawn at u [..., M] uniform, or the likeliest without u, [..., count]."""
        return None

    def verify(
        self, draft: Draft, logits: Tensor, warp: Warping, budget: NeighbourBudget, u: Tensor, last: Tensor
    ) -> Verdict | None:
        """Return the verdict on a draft with logits [B, N, V], by `u` and `last` [B, 1] uniform.

        u [B, levels, K]: token by token; u [B, 1]: jointly, as block and traversal verification.
        """
        return None

    def step(self, engine: Any, verify: str) -> Step | None:
        """Return complete steps of a new `Engine`, with the same bits as its parts; verify: the name of its verifier."""
        return None


PYTORCH = Backend()
CPU = torch.device("cpu")


def backend(device: torch.device = CPU) -> Backend:
    """Return the backend for a device: PyTorch on all but CPUs."""
    if device.type != "cpu":
        return PYTORCH
    on_cpu: Backend = imported("backend", BACKEND)()
    return on_cpu
