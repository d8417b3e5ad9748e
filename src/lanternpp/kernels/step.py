"""Verification of drafts, and whole steps in one call of C (`verify.c`, `step.c`): plain decoding, chains of a parallel drafter."""

from __future__ import annotations

from ctypes import c_double
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.engine.cache import Cache
from lanternpp.engine.decode import Engine
from lanternpp.engine.verify import TOKEN
from lanternpp.kernels.binding import LANES, structs
from lanternpp.kernels.linear import computable
from lanternpp.kernels.packing import KernelDecoder, KernelDrafter
from lanternpp.models.base import Target
from lanternpp.trees.static import chain_tree
from lanternpp.types import NeighbourBudget, Tree, Warping

MAX_EMBEDDINGS = 1 << 26  # numbers of a table of embeddings that the kernels copy


def verification(
    tree: Tree, logits: Tensor, warp: Warping, budget: NeighbourBudget, joint: bool, **inputs: Tensor | None
) -> Any:
    """Return the structure of C for logits [B, N, V], with memory for its outputs; inputs: its other tensors by name."""
    batch, nodes, vocab = logits.shape
    levels, table = len(tree.widths), budget.table
    sizes = joint, batch, nodes, vocab, tree.children.shape[2], levels
    call = structs.Verification(*sizes, optimal=budget.optimal, sampling=structs.Sampling(*warp), **inputs)
    call.logits, call.children = logits, tree.children
    call.order = tree.layout.order if joint and tree.layout else None
    limits = [limit for pair in budget.limits for limit in pair]
    call.limit = (c_double * len(limits))(*limits)
    call.path, call.following = torch.empty(2, batch, levels + 1, dtype=torch.int64)
    call.kept, call.bonus = torch.empty(2, batch, dtype=torch.int64)
    if table is not None:
        call.near, call.table = table.shape[1], by_lanes(table) if joint else table
    if joint:
        call.node = torch.empty(batch, nodes, 5, dtype=torch.float64)
        call.distribution = torch.empty(batch, nodes, vocab, dtype=torch.float32)
    return call


@lru_cache(4)
def by_lanes(table: Tensor) -> Tensor:
    """Return neighbours [V, k] in the order that `Verification` of verify.c reads, [V / LANES rounded up, k, LANES]."""
    padded = F.pad(table.int(), (0, 0, 0, -len(table) % LANES))
    return padded.view(-1, LANES, table.shape[1]).transpose(1, 2).contiguous()


@torch.inference_mode()
def fused_step(engine: Engine, verify: str) -> KernelStep | None:
    """Return the fused steps of a new engine in C; None where C lacks a part of them. verify: the name of the verifier.

    C has no measured steps, no greedy choice and no target that constrains its codes.
    """
    target, joint = engine.target, verify != TOKEN
    proposer: Any = engine.proposer  # `Parallel`, or `NoDraft`, which has no drafter
    plain = type(target).constrain is Target.constrain and type(target).forward is Target.forward
    if type(engine) is not Engine or engine.measure_tv or engine.sampling.greedy or not plain:
        return None
    budget = engine.rule.as_numbers(proposer.depth) if proposer.supports_fused_steps else None
    if budget is None or (joint and not (engine.rule.lossless or budget.optimal)):
        return None
    decoder, head = target.decoder.native, target.native_head
    if not isinstance(decoder, KernelDecoder) or head is None or not computable(engine.cache.kv):
        return None
    if proposer.depth:
        drafter, drafter_decoder = proposer.drafter.native, proposer.drafter.decoder.native
        if not isinstance(drafter, KernelDrafter) or drafter.head is None:
            return None
        if not isinstance(drafter_decoder, KernelDecoder):
            return None
    if decoder.embeddings is None and target.vocab * decoder.shape.dim <= MAX_EMBEDDINGS:
        decoder.embeddings = target.embed(torch.arange(target.vocab)[None])[0].contiguous()
    if decoder.embeddings is None or not computable(decoder.embeddings):
        return None
    return KernelStep(engine, budget, joint)


class KernelStep:
    """Steps of a batch. The structure of C has the addresses of the engine's tensors, which are written in place."""

    def __init__(self, engine: Engine, budget: NeighbourBudget, joint: bool):
        target, cache, batch, branches = engine.target, engine.cache, engine.batch, engine.guidance.branches
        proposer: Any = engine.proposer
        decoder, head = cast("Any", target.decoder.native), cast("Any", target.native_head).__self__
        levels, aux_layers, dim = proposer.depth, proposer.aux_layers, decoder.shape.dim
        nodes, rows, parts = levels + 1, branches * batch, 1 + len(aux_layers)
        new = cache.kv.new_empty
        tree = chain_tree(batch, levels, engine.codes.device)
        logits = torch.empty(batch, nodes, target.vocab, dtype=torch.float32)
        verify = verification(tree, logits, engine.sampling.warp, budget, joint)
        verify.drawn = torch.empty(batch, nodes, dtype=torch.int64)
        verify.u = torch.empty(batch, nodes, dtype=torch.float64)
        verify.last = torch.empty(batch, dtype=torch.float64)
        step = structs.Step(batch=batch, branches=branches, levels=levels, guidance=engine.guidance.scale)
        step.length, step.width = target.length, engine.codes.shape[1]
        step.target = _network(decoder, cache, rows, nodes)
        step.head, step.embed = head.struct, decoder.embeddings
        step.parts, step.part = parts, decoder.part(aux_layers)
        step.seed, step.passes, step.count = engine.noise.seed, engine.passes, engine.count
        step.decided, step.accepted = engine.codes, engine.accepted
        step.root, step.root_count = proposer.root, proposer.count
        # The kernels read and write complete vectors: there is room for one after the last number.
        step.x, step.features = new(rows, nodes, dim), new(rows * nodes * parts * dim + LANES)
        if levels:
            verify.q, step.guided = proposer.probs_of_nodes, proposer.features
            step.drafter = _drafter(proposer)
        else:
            step.guided = new(batch * nodes * dim + LANES)
        step.verification = verify
        self.library, self.step = decoder.library, step

    def run(self, first: int = 0, last: int = 3) -> None:
        """Run stages `first` to `last` of a step, as `Step` of step.c numbers them."""
        self.step.first, self.step.last = first, last
        self.step.run(self.library)


def _network(decoder: KernelDecoder, cache: Cache, rows: int, nodes: int) -> Any:
    """Return the structure of a decoder and its cache, with memory for the inputs of `nodes` nodes a row."""
    table, slots = decoder.rotary_table, cache.kv.shape[4]
    network = structs.Network(decoder.shape, decoder.layers, table, len(table), slots)
    network.kv, network.start, network.used = cache.kv, cache.start, cache.used
    network.rotation = table.new_empty(rows, nodes, *table.shape[1:])
    network.slot = torch.empty(rows, nodes, dtype=torch.int64)
    # The kernels read complete vectors: the last one may pass the end of the last mask.
    network.mask = torch.empty(rows * nodes * slots + 64, dtype=torch.uint8)
    return network


def _drafter(proposer: Any) -> Any:
    """Return the structure of a proposer's drafter and of its state, with memory for a draft."""
    drafter, new = proposer.drafter, proposer.hints.new_empty
    batch, levels, dim = proposer.hints.shape
    network = _network(drafter.decoder.native, proposer.cache, batch, 2 * levels)
    call = structs.Drafter(network, drafter.native.layers, proposer.waiting, proposer.next_embeds)
    call.features, call.hints, call.prev = proposer.features, proposer.hints, proposer.prev_code_table
    call.all_hints, call.x, call.out = (new(batch, 2 * levels, dim) for _ in range(3))
    call.level_features, call.query = new(batch * levels, dim), new(batch * levels, drafter.down.out_features)
    call.u = torch.empty(batch, levels, dtype=torch.float64)
    return call
