"""Verification of drafts, and whole steps in one call of C (`verify.c`, `step.c`): plain decoding, chains of a parallel drafter."""

from __future__ import annotations

from ctypes import c_double
from functools import lru_cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.engine.cache import Cache
from lanternpp.engine.decode import Engine
from lanternpp.engine.verify.choose import TOKEN
from lanternpp.kernels.binding import LANES, structs
from lanternpp.kernels.linear import takes
from lanternpp.kernels.packing import KernelDecoder, KernelDrafter
from lanternpp.models.base import Target
from lanternpp.trees.chain import chain_tree
from lanternpp.types import NeighbourBudget, Tree, Warping

MOST_EMBEDDINGS = 1 << 26  # numbers of a table of embeddings, which is kept once more


def verification(
    tree: Tree, logits: Tensor, warp: Warping, budget: NeighbourBudget, joint: bool, **read: Tensor | None
) -> Any:
    """The structure of C for logits [B, N, V], with memory for what is written; read: its other inputs."""
    (batch, nodes, vocab), table, levels = logits.shape, budget.table, len(tree.widths)
    limits = [limit for pair in budget.limits for limit in pair]
    sizes = joint, batch, nodes, vocab, tree.children.shape[2], levels, 0, budget.optimal
    work = structs.Verification(*sizes, structs.Sampling(*warp), logits, children=tree.children, **read)
    work.order = tree.layout.order if joint and tree.layout else None
    work.limit = (c_double * len(limits))(*limits)
    work.path, work.following = torch.empty(2, batch, levels + 1, dtype=torch.int64)
    work.kept, work.bonus = torch.empty(2, batch, dtype=torch.int64)
    if table is not None:
        work.near, work.table = table.shape[1], by_lanes(table) if joint else table
    if joint:
        work.node = torch.empty(batch, nodes, 5, dtype=torch.float64)
        work.distribution = torch.empty(batch, nodes, vocab, dtype=torch.float32)
    return work


@lru_cache(4)
def by_lanes(table: Tensor) -> Tensor:
    """Neighbours [V, k] as `Verification` of verify.c has them, [up to V / LANES, k, LANES]."""
    padded = F.pad(table.int(), (0, 0, 0, -len(table) % LANES))
    return padded.view(-1, LANES, table.shape[1]).transpose(1, 2).contiguous()


@torch.inference_mode()
def fused_step(engine: Engine, verify: str) -> KernelStep | None:
    """The whole steps of a new engine in C; None where a part of it is unknown there. verify: the name of its verifier.

    Neither measured steps nor the greedy choice are known there, and no target that constrains its codes.
    """
    target, joint = engine.target, verify != TOKEN
    proposer: Any = engine.proposer  # `Parallel`, or `NoDraft`, which has no drafter
    plain = type(target).constrain is Target.constrain and type(target).forward is Target.forward
    if type(engine) is not Engine or engine.measure_tv or engine.sampling.greedy or not plain:
        return None
    rule, decoder = engine.rule, target.decoder.native
    budget = rule.as_numbers(proposer.depth) if proposer.whole_steps else None
    if budget is None or (joint and not (rule.lossless or budget.optimal)):
        return None
    if not isinstance(decoder, KernelDecoder) or target.native_head is None or not takes(engine.cache.kv):
        return None
    if proposer.depth:
        own, passes = proposer.drafter.native, proposer.drafter.decoder.native
        if not isinstance(own, KernelDrafter) or own.head is None or not isinstance(passes, KernelDecoder):
            return None
    if decoder.embeddings is None and target.vocab * decoder.shape.dim <= MOST_EMBEDDINGS:
        decoder.embeddings = target.embed(torch.arange(target.vocab)[None])[0].contiguous()
    known = decoder.embeddings is not None and takes(decoder.embeddings)
    return KernelStep(engine, budget, joint) if known else None


class KernelStep:
    """Steps of a batch. The structure of C has the addresses of the engine's tensors, which are written in place."""

    def __init__(self, engine: Engine, budget: NeighbourBudget, joint: bool):
        target, batch, branches = engine.target, engine.batch, engine.guidance.branches
        decoder, head = cast("Any", target.decoder.native), cast("Any", target.native_head).__self__
        proposer: Any = engine.proposer
        levels, aux_layers, drafts = proposer.depth, proposer.aux_layers, proposer.depth > 0
        nodes, rows, dim, parts = levels + 1, branches * batch, decoder.shape.dim, 1 + len(aux_layers)
        sizes = batch, branches, levels, target.length, engine.codes.shape[1]
        state = engine.noise.seed, engine.passes, engine.count, engine.codes, engine.accepted
        new, doubles = engine.cache.kv.new_empty, partial(torch.empty, dtype=torch.float64)
        tree, logits = (
            chain_tree(batch, levels, engine.codes.device),
            torch.empty(batch, nodes, target.vocab, dtype=torch.float32),
        )
        verify = verification(tree, logits, engine.sampling.warp, budget, joint)
        verify.drawn, verify.u = torch.empty(batch, nodes, dtype=torch.int64), doubles(batch, nodes)
        verify.last, verify.q = doubles(batch), proposer.probs_of_nodes if drafts else None
        step = structs.Step(0, 3, *sizes, engine.guidance.scale, _network(decoder, engine.cache, rows, nodes))
        step.head, step.embed = head.struct, decoder.embeddings
        step.parts, step.part = parts, decoder.part(aux_layers)
        step.seed, step.passes, step.count, step.decided, step.accepted = state
        step.root, step.root_count = proposer.root, proposer.count
        # The last vector of these may be read and written to its end.
        step.x, step.features = new(rows, nodes, dim), new(rows * nodes * parts * dim + LANES)
        step.guided = proposer.features if drafts else new(batch * nodes * dim + LANES)
        step.drafter, step.verification = _drafter(proposer) if drafts else None, verify
        self.library, self.step = decoder.library, step

    def run(self, first: int = 0, last: int = 3) -> None:
        """Stages `first` to `last` of a step, as `Step` of step.c has them."""
        self.step.first, self.step.last = first, last
        self.step.run(self.library)


def _network(decoder: KernelDecoder, cache: Cache, rows: int, nodes: int) -> Any:
    table, slots, state = decoder.rotary_table, cache.kv.shape[4], (cache.kv, cache.start, cache.used)
    rotation, slot = (
        table.new_empty(rows, nodes, *table.shape[1:]),
        torch.empty(rows, nodes, dtype=torch.int64),
    )
    # A vector of the last mask may be read to its end.
    room = rotation, slot, torch.empty(rows * nodes * slots + 64, dtype=torch.uint8)
    return structs.Network(decoder.shape, decoder.layers, table, len(table), slots, *state, *room)


def _drafter(proposer: Any) -> Any:
    (batch, levels, dim), own, new = proposer.hints.shape, proposer.drafter, proposer.hints.new_empty
    network = _network(own.decoder.native, proposer.cache, batch, 2 * levels)
    work = structs.Drafter(network, own.native.layers, proposer.waiting, proposer.next_embeds)
    work.features, work.hints, work.prev = proposer.features, proposer.hints, proposer.prev_code_table
    work.all_hints, work.x, work.out = (new(batch, 2 * levels, dim) for _ in range(3))
    work.level_features, work.query = new(batch * levels, dim), new(batch * levels, own.down.out_features)
    work.u = torch.empty(batch, levels, dtype=torch.float64)
    return work
