"""Whole steps in one call of C (`step.c`): plain decoding, and chains of a parallel drafter."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_double, c_int64, c_void_p, cast, pointer, sizeof
from dataclasses import dataclass

import torch
from torch import Tensor

from lanternpp.engine.proposer import CacheState, ChainState
from lanternpp.kernels.chain import Heads, NativeChain, NativeInputs, QueryLayers, struct_of
from lanternpp.kernels.decoder import KernelDecoder
from lanternpp.kernels.sampling import NativeHead
from lanternpp.kernels.structs import Layer, Linear, Shape
from lanternpp.kernels.verify import Node, Verification, by_lanes
from lanternpp.types import NeighbourBudget, Warping

DRAFT, PASS, VERIFY, COMMIT = range(4)  # the stages of a step, as in step.c


class Drafter(Structure):
    """`Drafter` of step.c."""

    _fields_ = (
        ("shape", POINTER(Shape)),
        ("layers", POINTER(Layer)),
        ("query_layers", POINTER(QueryLayers)),
        ("heads", POINTER(Heads)),
        ("rotary", c_void_p),
        *((name, c_int64) for name in ("positions", "slots")),
        *(
            (name, c_void_p)
            for name in ("kv", "start", "used", "waiting", "next_embeds", "features", "hints")
        ),
        *((name, c_void_p) for name in ("prev", "all_hints", "x", "out", "level_features", "query")),
        *((name, c_void_p) for name in ("rotation", "slot", "mask", "u")),
    )


class Step(Structure):
    """`Step` of step.c."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "branches", "levels", "length", "width", "joint")),
        ("guidance", c_double),
        ("shape", POINTER(Shape)),
        ("layers", POINTER(Layer)),
        ("head", POINTER(Linear)),
        *((name, c_void_p) for name in ("embed", "rotary")),
        *((name, c_int64) for name in ("positions", "slots")),
        *((name, c_void_p) for name in ("kv", "start", "used")),
        ("parts", c_int64),
        ("part", c_void_p),
        *((name, c_void_p) for name in ("seed", "passes", "count", "decided", "accepted")),
        *((name, c_void_p) for name in ("root", "root_count", "x", "features", "guided")),
        *((name, c_void_p) for name in ("rotation", "slot", "mask", "scratch")),
        ("drafter", POINTER(Drafter)),
        ("verification", Verification),
    )


@dataclass(frozen=True)
class Samples:
    """The state of B samples, as `Engine` and `Proposer` keep it; all int64."""

    seed: Tensor  # [B], as are those without a shape
    passes: Tensor
    count: Tensor
    codes: Tensor  # [B, length + depth + 1]
    accepted: Tensor  # [B, length + depth + 1]
    root: Tensor
    root_count: Tensor  # the proposer's own count


@dataclass(frozen=True)
class Method:
    """The numbers of a method: guidance, sampling, acceptance rule and verifier."""

    branches: int
    guidance: float
    warp: Warping
    budget: NeighbourBudget
    joint: bool  # block or traversal verification; else token by token


class NativeStep:
    """Steps of a batch. It holds the addresses of the tensors it is given, which are written in place, and of packed weights, which
    the target and the proposer keep.
    """

    def __init__(
        self,
        decoder: KernelDecoder,
        head: NativeHead,
        embed: Tensor,
        cache: CacheState,
        samples: Samples,
        method: Method,
        length: int,
        chain: ChainState | None,
    ):
        """embed [V, D] bfloat16: the embeddings of all codes. length: codes of a picture. chain None: plain decoding."""
        self.library, self._kept = decoder.library, list[Tensor]()
        batch, (vocab, dim) = len(samples.count), embed.shape
        levels = 0 if chain is None else chain.hints.shape[1]
        nodes, rows = levels + 1, method.branches * batch
        parts = 1 if chain is None else 1 + len(chain.aux_layers)
        part = torch.zeros(decoder.shape.layers, dtype=torch.int64)
        for i, layer in enumerate(() if chain is None else chain.aux_layers):
            part[layer] = 1 + i
        guided = embed.new_empty(batch, nodes, dim) if chain is None else chain.features
        self.step = Step(
            *(batch, method.branches, levels, length, samples.codes.shape[1], method.joint, method.guidance),
            *(pointer(decoder.shape), cast(decoder.layers, POINTER(Layer)), pointer(head.packed.struct)),
            *self._at(embed, decoder.rotary_table),
            *(len(decoder.rotary_table), cache.kv.shape[4]),
            *self._at(cache.kv, cache.start, cache.used),
            parts,
            *self._at(part, samples.seed, samples.passes, samples.count, samples.codes, samples.accepted),
            *self._at(samples.root, samples.root_count),
            *self._at(embed.new_empty(rows, nodes, dim), embed.new_empty(rows, nodes, parts * dim), guided),
            *self._nodes(rows, nodes, decoder, cache),
            None,
            None if chain is None else pointer(self._drafter(chain)),
            self._verification(method, batch, levels, vocab, chain),
        )
        self.threads = 0  # that there is scratch memory for

    def run(self, first: int = DRAFT, last: int = COMMIT) -> None:
        """Stages `first` to `last` of a step."""
        threads = torch.get_num_threads()
        if threads > self.threads:
            self.scratch = torch.empty(self.library.step_bytes(byref(self.step), threads), dtype=torch.uint8)
            self.step.scratch, self.threads = self.scratch.data_ptr(), threads
        self.library.run_step(byref(self.step), first, last, threads)

    def _at(self, *tensors: Tensor) -> list[int]:
        """The addresses of tensors, which live as long as this object."""
        assert all(tensor.is_contiguous() for tensor in tensors)
        self._kept += tensors
        return [tensor.data_ptr() for tensor in tensors]

    def _nodes(self, rows: int, nodes: int, decoder: KernelDecoder, cache: CacheState) -> list[int]:
        """Room for the rotations, slots and masks of a pass."""
        rotation = torch.empty(rows, nodes, *decoder.rotary_table.shape[1:])
        slot = torch.empty(rows, nodes, dtype=torch.int64)
        # a vector of the last mask may be read to its end
        mask = torch.empty(rows * nodes * cache.kv.shape[4] + 64, dtype=torch.uint8)
        return self._at(rotation, slot, mask)

    def _drafter(self, chain: ChainState) -> Drafter:
        batch, levels, dim = chain.hints.shape
        decoder, inputs, sampler = (
            chain.drafter.decoder.native,
            chain.drafter.native_inputs,
            chain.drafter.native,
        )
        assert (
            isinstance(decoder, KernelDecoder)
            and isinstance(inputs, NativeInputs)
            and isinstance(sampler, NativeChain)
        )
        like, hidden, span = chain.hints, chain.prev.shape[1], 2 * levels
        own = (like.new_empty(batch, span, dim) for _ in range(3))
        return Drafter(
            *(pointer(decoder.shape), cast(decoder.layers, POINTER(Layer))),
            *(pointer(inputs.layers), pointer(sampler.heads)),
            *self._at(decoder.rotary_table),
            *(len(decoder.rotary_table), chain.cache.kv.shape[4]),
            *self._at(chain.cache.kv, chain.cache.start, chain.cache.used, chain.waiting),
            *self._at(chain.next_embeds, chain.features, chain.hints, chain.prev, *own),
            *self._at(like.new_empty(batch * levels, dim), like.new_empty(batch * levels, hidden)),
            *self._nodes(batch, span, decoder, chain.cache),
            *self._at(torch.empty(batch, levels, dtype=torch.float64)),
        )

    def _verification(
        self, method: Method, batch: int, levels: int, vocab: int, chain: ChainState | None
    ) -> Verification:
        nodes, budget, joint = levels + 1, method.budget, method.joint
        children = torch.arange(1, nodes + 1).where(torch.arange(nodes) < levels, -1).repeat(batch, 1)
        table, near = budget.table, 0 if budget.table is None else budget.table.shape[1]
        if table is not None:
            table = by_lanes(table) if joint else table.contiguous()
        whole, double = torch.int64, torch.float64
        limits = torch.tensor(budget.limits, dtype=double)
        return Verification(
            *(batch, nodes, vocab, 1, levels, near, budget.optimal, struct_of(method.warp)),
            *self._at(torch.empty(batch, nodes, vocab)),
            *([None] if chain is None else self._at(chain.probs)),
            *self._at(torch.empty(batch, nodes, dtype=whole), children),
            None,
            *self._at(torch.empty(batch, levels if not joint else 1, dtype=double)),
            *self._at(torch.empty(batch, dtype=double), limits),
            *([None] if table is None else self._at(table)),
            *self._at(torch.empty(batch, nodes, sizeof(Node) // 8, dtype=double)),
            *self._at(torch.empty(batch, nodes, vocab) if joint else torch.empty(0)),
            *self._at(*(torch.empty(batch, nodes, dtype=whole) for _ in range(2))),
            *self._at(*(torch.empty(batch, dtype=whole) for _ in range(2))),
            None,
        )
