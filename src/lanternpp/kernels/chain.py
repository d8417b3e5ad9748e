"""A parallel drafter's layers before and after its decoder, and the codes of a chain, in C (`chain.c`, `step.c`)."""

from __future__ import annotations

import ctypes
from ctypes import byref

import torch
from torch import Tensor

from lanternpp.kernels.linear import Packed, takes
from lanternpp.kernels.loading import kernels
from lanternpp.kernels.memory import scratch
from lanternpp.kernels.structs import (
    BLOCK_N,
    LANES,
    Chain,
    Heads,
    QueryInputs,
    QueryLayers,
    warp_of,
)
from lanternpp.nn.backend import Weights
from lanternpp.nn.stores import quantised
from lanternpp.types import Draft, Warping

MOST_PICTURES = 16  # drafted for at once; PyTorch's products are faster for more


class NativeChain:
    """The codes of a parallel drafter's chain.

    The head's logits of `combine` are those of the features, which are computed for all levels together, and `turn`, the product
    of the head's weights with those of `up`, times what is known of the code before.
    """

    def __init__(
        self,
        up: Weights,
        head: Weights,
        library: ctypes.CDLL,
        confidence: Weights | None = None,
        packed: Packed | None = None,
    ):
        self.library, (weight, bias) = library, up
        turned = None if bias is None else product(head[0], bias[:, None])[:, 0]
        # In 8 bits: a draft's rounding changes what is offered, not the distribution of pictures.
        turn = product(head[0], weight)
        turn.eight_bits = quantised(turn, 8)  # type: ignore[attr-defined]
        self.turn = Packed(library, [turn], [turned], int8=True)
        self.head = packed or Packed(library, [head[0]], [head[1]], int8=False)
        self.heads = Heads(turn=self.turn.struct, head=self.head.struct)
        self.confidence: dict[str, Tensor | float] = {}
        if confidence is not None:
            start = torch.zeros_like(weight[:, :1]) if bias is None else bias[:, None]
            layer = confidence[0].detach().contiguous()
            first = 0.0 if confidence[1] is None else float(confidence[1])
            turn = product(layer, torch.cat((weight, start), 1))
            self.confidence = {"confidence": layer, "confidence_turn": turn, "confidence_bias": first}

    def takes(self, features: Tensor) -> bool:
        """Whether it draws codes from features [B, levels, D]."""
        return takes(features) and len(features) <= MOST_PICTURES

    def __call__(
        self,
        features: Tensor,
        level_query: Tensor,
        prev_code_table: Tensor,
        bias: Tensor | None,
        u: Tensor,
        warp: Warping,
        draft: Draft,
        min_survival: float = 0.0,
    ) -> bool:
        """As `SampleChain`."""
        if not self.takes(features):
            return False
        (batch, levels), threads = features.shape[:2], torch.get_num_threads()
        inputs = {"features": features, "query": level_query, "prev": prev_code_table, "u": u}
        outputs = {"probs": draft.probs, "drawn": draft.codes, "survival": draft.survival}
        chain = Chain(
            {name: x.contiguous() for name, x in inputs.items()},
            outputs,
            self.confidence,
            {"batch": batch, "levels": levels, "codes": self.heads.head.outputs},
            sampling=warp_of(warp),
            bias=None if bias is None else bias.float().contiguous(),
            min_survival=min_survival,
            scratch=scratch(self.library.chain_bytes(byref(self.heads), batch, levels, threads)),
        )
        self.library.sample_chain(byref(self.heads), byref(chain), threads)
        return True


class NativeInputs:
    """What a parallel drafter's decoder reads, and the queries of its levels: packed layers around the decoder."""

    def __init__(
        self, fc: Weights, hint: Weights, down: Weights, queries: Tensor, eps: float, library: ctypes.CDLL
    ):
        """eps: of the norm of what layers of the target return, which `fc` reads after embeddings and features."""
        self.library = library
        packed = [Packed(library, [weight], [bias], int8=True) for weight, bias in (fc, hint, down)]
        self.down, (count, dim) = packed[2], queries.shape
        self.layers = QueryLayers(
            {name: each.struct for name, each in zip(("fc", "hint", "down"), packed, strict=True)},
            {"query_count": count, "dim": dim, "aux": fc[0].shape[1] // dim - 2},
            queries=queries.detach().contiguous(),
            eps=eps,
        )

    def takes(self, x: Tensor) -> bool:
        """Whether it computes those of embeddings or features x."""
        return takes(x)

    def __call__(self, next_embeds: Tensor, features: Tensor, queries: int, hints: Tensor | None) -> Tensor:
        """next_embeds [B, N, D], features [B, N, (1 + aux) D], hints [B, N + Q, D] -> the decoder's inputs, [B, N + Q, D]."""
        batch, known, dim = next_embeds.shape
        rows, out = batch * (known + queries), next_embeds.new_empty(batch, known + queries, dim)
        work = QueryInputs(
            {"batch": batch, "known": known, "queries": queries, "stride": known},
            next_embeds=next_embeds.contiguous(),
            features=features.contiguous(),
            hints=None if hints is None else hints.contiguous(),
            out=out,
            scratch=scratch(self.library.drafter_inputs_bytes(byref(self.layers), batch * known, rows)),
        )
        self.library.drafter_inputs(byref(self.layers), byref(work), torch.get_num_threads())
        return out

    def level_query(self, features: Tensor) -> Tensor:
        """Features of levels [B, levels, D] -> [B, levels, H]."""
        return self.down(features, torch.bfloat16)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] times b [k, m] in float32, of sums in float64: their rounding does not depend on the number of threads."""
    b = b.detach().double()
    return torch.cat([(rows.double() @ b).float() for rows in a.detach().split(4096)])


def native_chain(
    up: Weights,
    head: Weights | None,
    confidence: Weights | None = None,
    packed: Packed | None = None,
) -> NativeChain | None:
    """Chains in C; None where the head is not linear, or the weights or this machine do not allow it.

    up, head and confidence: those of `ParallelDrafter.combine`, of the target, and of `QueryDrafter.confidence`. packed: the
    head, where it is packed already; it is then shared.
    """
    if head is None or up[0].shape[1] % LANES or head[0].shape[1] % BLOCK_N:
        return None
    library = _library(up[0], head[0])
    return None if library is None else NativeChain(up, head, library, confidence, packed)


def native_inputs(
    fc: Weights, hint: Weights, down: Weights, queries: Tensor, eps: float
) -> NativeInputs | None:
    """A parallel drafter's layers around its decoder in C; None where the weights or this machine do not allow it."""
    weights = [layer[0] for layer in (fc, hint, down)]
    odd = any(size % BLOCK_N for weight in weights for size in weight.shape)
    library = None if odd else _library(*weights)
    return None if library is None else NativeInputs(fc, hint, down, queries, eps, library)


def _library(*weights: Tensor) -> ctypes.CDLL | None:
    """The kernels, where all weights are bfloat16 on a CPU."""
    fit = all(weight.dtype == torch.bfloat16 and weight.device.type == "cpu" for weight in weights)
    return kernels() if fit else None
