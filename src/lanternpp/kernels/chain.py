"""A parallel drafter's layers before and after its decoder, and the guesses of a chain, in C (`chain.c`, `step.c`).

They are many small operations over V codes, and for few rows starting PyTorch's takes longer than computing them.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_double, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from lanternpp.kernels.linear import Packed
from lanternpp.kernels.loading import kernels
from lanternpp.kernels.structs import BLOCK_N, Linear
from lanternpp.nn.backend import Weights
from lanternpp.nn.stores import quantised
from lanternpp.types import Draft, Warping, on_host

LANES = 16  # floats of a vector, as in decoder.c
MOST_PICTURES = 16  # drafted for at once; PyTorch's products are faster for more


class Heads(Structure):
    """`Heads` of chain.c."""

    _fields_ = (("turn", Linear), ("head", Linear))


class Warp(Structure):
    """`Sampling` of chain.c."""

    _fields_ = (("temperature", c_double), ("top_p", c_double), ("top_k", c_int64))


class Chain(Structure):
    """`Chain` of chain.c."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "levels", "codes")),
        ("sampling", Warp),
        *((name, c_void_p) for name in ("features", "query", "prev", "bias", "u")),
        *((name, c_void_p) for name in ("probs", "drawn", "scratch")),
        *((name, c_void_p) for name in ("confidence", "confidence_turn", "survival")),
        *((name, c_double) for name in ("confidence_bias", "cut")),
    )


class QueryLayers(Structure):
    """`QueryLayers` of step.c."""

    _fields_ = (
        *((name, Linear) for name in ("fc", "hint", "down")),
        ("queries", c_void_p),
        *((name, c_int64) for name in ("query_count", "dim", "aux")),
        ("eps", c_float),
    )


class QueryInputs(Structure):
    """`QueryInputs` of step.c."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "known", "queries", "stride")),
        *((name, c_void_p) for name in ("next_embeds", "features", "hints", "out", "scratch")),
    )


class NativeChain:
    """The guesses of a parallel drafter in a chain.

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
        # In 8 bits: a draft's rounding changes what is offered, not what pictures follow.
        turn = product(head[0], weight)
        turn.eight_bits = quantised(turn, 8)  # type: ignore[attr-defined]
        self.turn = Packed(library, [turn], [turned], int8=True)
        self.head = packed or Packed(library, [head[0]], [head[1]], int8=False)
        self.heads = Heads(self.turn.struct, self.head.struct)
        self.confidence: tuple[int | None, int | None, float] = (None, None, 0.0)
        if confidence is not None:
            self._confidence = confidence[0].detach().contiguous()
            start = torch.zeros_like(weight[:, :1]) if bias is None else bias[:, None]
            self._confidence_turn = product(self._confidence, torch.cat((weight, start), 1))
            first = 0.0 if confidence[1] is None else float(confidence[1])
            self.confidence = self._confidence.data_ptr(), self._confidence_turn.data_ptr(), first

    def takes(self, features: Tensor) -> bool:
        """Whether it draws guesses from features [B, levels, D]."""
        few = on_host(features) and len(features) <= MOST_PICTURES
        return few and features.dtype == torch.bfloat16

    def __call__(
        self,
        features: Tensor,
        level_query: Tensor,
        prev_code_table: Tensor,
        bias: Tensor | None,
        u: Tensor,
        warp: Warping,
        draft: Draft,
        cut: float = 0.0,
    ) -> bool:
        """features [B, levels, D], level_query [B, levels, H], prev_code_table [V, H] -> codes and probs of the chain `draft`.

        bias [B, levels, V] is added to the logits; u [B, levels] float64, uniform; warp: temperature, top-k and top-p. cut: above
        0, survival [B, levels] float32 is written too, and drawing ends where it is below this for all B.
        """
        if not self.takes(features):
            return False
        batch, levels = features.shape[:2]
        threads, vocab = torch.get_num_threads(), self.heads.head.outputs
        size: int = self.library.chain_bytes(byref(self.heads), batch, levels, threads)
        inputs = [features.contiguous(), level_query.contiguous(), prev_code_table.contiguous()]
        bias, u = None if bias is None else bias.float().contiguous(), u.contiguous()
        scratch = torch.empty(size, dtype=torch.uint8)
        assert draft.probs is not None and draft.probs.is_contiguous() and draft.codes.is_contiguous()
        chain = Chain(
            *(batch, levels, vocab, struct_of(warp), *(x.data_ptr() for x in inputs)),
            None if bias is None else bias.data_ptr(),
            *(x.data_ptr() for x in (u, draft.probs, draft.codes, scratch)),
            *self.confidence[:2],
            None if draft.survival is None else draft.survival.data_ptr(),
            *(self.confidence[2], cut),
        )
        self.library.draw_chain(byref(self.heads), byref(chain), threads)
        return True


class NativeInputs:
    """What a parallel drafter's decoder reads, and the queries of its levels: packed layers around the decoder."""

    def __init__(
        self, fc: Weights, hint: Weights, down: Weights, queries: Tensor, eps: float, library: ctypes.CDLL
    ):
        """eps: of the norm of what layers of the target return, which `fc` reads behind embeddings and features."""
        self.library, self.queries = library, queries.detach().contiguous()
        self.packed = [Packed(library, [weight], [bias], int8=True) for weight, bias in (fc, hint, down)]
        count, dim = queries.shape
        aux = fc[0].shape[1] // dim - 2
        linear = (each.struct for each in self.packed)
        self.layers = QueryLayers(*linear, self.queries.data_ptr(), count, dim, aux, eps)

    def takes(self, x: Tensor) -> bool:
        """Whether it computes those of embeddings or features x."""
        return on_host(x) and x.dtype == torch.bfloat16

    def __call__(self, next_embeds: Tensor, features: Tensor, queries: int, hints: Tensor | None) -> Tensor:
        """next_embeds [B, N, D], features [B, N, (1 + aux) D], hints [B, N + Q, D] -> the decoder's inputs, [B, N + Q, D]."""
        (batch, known, dim), threads = next_embeds.shape, torch.get_num_threads()
        rows = batch * (known + queries)
        out = next_embeds.new_empty(batch, known + queries, dim)
        size = self.library.drafter_inputs_bytes(byref(self.layers), batch * known, rows)
        scratch = torch.empty(size, dtype=torch.uint8)
        given = [None if x is None else x.contiguous() for x in (next_embeds, features, hints, out, scratch)]
        places = (None if x is None else x.data_ptr() for x in given)
        work = QueryInputs(batch, known, queries, known, *places)
        self.library.drafter_inputs(byref(self.layers), byref(work), threads)
        return out

    def level_query(self, features: Tensor) -> Tensor:
        """Features of levels [B, levels, D] -> [B, levels, H]."""
        return self.packed[2](features, torch.bfloat16)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] times b [k, m] in float32, of sums in float64: their rounding does not depend on the number of threads."""
    b = b.detach().double()
    return torch.cat([(rows.double() @ b).float() for rows in a.detach().split(4096)])


def struct_of(warp: Warping) -> Warp:
    """Temperature, top-k and top-p, as `Sampling` of chain.c."""
    return Warp(warp[0], warp[2], warp[1])


def row_scratch(library: ctypes.CDLL, vocab: int, threads: int, draws: int = 0) -> Tensor:
    """The scratch memory of kernels that handle rows of V codes, one in each thread; draws: codes drawn for a row."""
    return torch.empty(library.row_bytes(vocab, draws, threads), dtype=torch.uint8)


def fits(p: Tensor) -> bool:
    """Whether these probabilities are of the dtype and on the device that the kernels know."""
    return p.dtype == torch.float32 and on_host(p)


def native_chain(
    up: Weights,
    head: Weights | None,
    confidence: Weights | None = None,
    packed: Packed | None = None,
) -> NativeChain | None:
    """Guesses in C; None where the head is not linear, or the weights or this machine do not allow it.

    up, head and confidence: those of `ParallelDrafter.combine`, of the target, and of `QueryDrafter.confidence`. packed: the
    head, where it is packed already; it is then shared.
    """
    if head is None or up[0].shape[1] % LANES or head[0].shape[1] % BLOCK_N:
        return None
    if any(weight.dtype != torch.bfloat16 or weight.device.type != "cpu" for weight, _ in (up, head)):
        return None
    found = kernels()
    return None if found is None else NativeChain(up, head, found, confidence, packed)


def native_inputs(
    fc: Weights, hint: Weights, down: Weights, queries: Tensor, eps: float
) -> NativeInputs | None:
    """A parallel drafter's layers around its decoder in C; None where the weights or this machine do not allow it."""
    weights = [layer[0] for layer in (fc, hint, down)]
    if any(weight.dtype != torch.bfloat16 or weight.device.type != "cpu" for weight in weights):
        return None
    if any(size % BLOCK_N for weight in weights for size in weight.shape):
        return None
    found = kernels()
    return None if found is None else NativeInputs(fc, hint, down, queries, eps, found)
