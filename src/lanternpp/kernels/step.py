"""Whole steps in one call of C (`step.c`): plain decoding, and chains of a parallel drafter."""

from __future__ import annotations

from ctypes import byref
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lanternpp.engine.decode import Engine
from lanternpp.engine.proposer import ChainState
from lanternpp.engine.verify.choose import TOKEN
from lanternpp.kernels.chain import NativeChain, NativeInputs
from lanternpp.kernels.decoder import KernelDecoder
from lanternpp.kernels.linear import NativeHead
from lanternpp.kernels.memory import scratch
from lanternpp.kernels.sampling import by_lanes, verification
from lanternpp.kernels.structs import Drafter, Step
from lanternpp.models.base import Target
from lanternpp.types import NeighbourBudget

DRAFT, PASS, VERIFY, COMMIT = range(4)  # the stages of a step, as in step.c
MOST_EMBEDDINGS = 1 << 26  # numbers of a table of embeddings, which is kept once more
_tables: WeakKeyDictionary[Target, Tensor] = WeakKeyDictionary()


@torch.inference_mode()
def fused_step(engine: Engine, verify: str) -> NativeStep | None:
    """The whole steps of a new engine in C; None where a part of it is unknown there. verify: the name of its verifier.

    Neither measured steps nor the greedy choice are known there, and no target that constrains its codes.
    """
    target, proposer = engine.target, engine.proposer
    if type(engine) is not Engine or engine.measure_tv or engine.sampling.greedy:
        return None
    if not isinstance(target.decoder.native, KernelDecoder) or not isinstance(target.native_head, NativeHead):
        return None
    plain = type(target).constrain is Target.constrain and type(target).forward is Target.forward
    offered, budget = proposer.chain_state(), engine.rule.as_numbers(proposer.depth)
    if not plain or offered is None or budget is None or not _known(offered[0]):
        return None
    joint = verify != TOKEN
    if not target.decoder.native.takes(engine.cache.kv) or (
        joint and not (engine.rule.lossless or budget.optimal)
    ):
        return None
    table = _embeddings(target)
    return None if table is None else NativeStep(engine, table, budget, joint, offered[0])


def _known(chain: ChainState | None) -> bool:
    """Whether the kernels compute all of a drafter, or there is none."""
    if chain is None:
        return True
    drafter = chain.drafter
    known = isinstance(drafter.native_inputs, NativeInputs) and isinstance(drafter.native, NativeChain)
    return known and isinstance(drafter.decoder.native, KernelDecoder) and drafter.native.takes(chain.hints)


def _embeddings(target: Target) -> Tensor | None:
    """The embeddings of all codes, [V, D] in bfloat16; None where they are too many, or have another dtype."""
    if target.vocab * target.decoder.config.dim > MOST_EMBEDDINGS:
        return None
    if target not in _tables:
        found = target.embed(torch.arange(target.vocab)[None])[0]
        if found.dtype != torch.bfloat16:
            return None
        _tables[target] = found.contiguous()
    return _tables[target]


class NativeStep:
    """Steps of a batch. The structure of C has the addresses of the engine's tensors, which are written in place."""

    def __init__(
        self, engine: Engine, embed: Tensor, budget: NeighbourBudget, joint: bool, chain: ChainState | None
    ):
        """embed [V, D] bfloat16: the embeddings of all codes. chain None: plain decoding."""
        target, proposer, guidance = engine.target, engine.proposer, engine.guidance
        decoder, head = target.decoder.native, target.native_head
        assert isinstance(decoder, KernelDecoder) and isinstance(head, NativeHead)
        self.library, batch, dim = decoder.library, len(engine.count), embed.shape[1]
        levels = 0 if chain is None else chain.hints.shape[1]
        aux_layers = () if chain is None else chain.aux_layers
        nodes, rows, parts = levels + 1, guidance.branches * batch, 1 + len(aux_layers)
        self.step = Step(
            {"batch": batch, "branches": guidance.branches, "levels": levels, "length": target.length},
            {"width": engine.codes.shape[1], "joint": joint, "guidance": guidance.scale},
            {"head": head.packed.struct, "embed": embed, "parts": parts, "part": decoder.part(aux_layers)},
            _pass(decoder, engine.cache, rows, nodes),
            {"seed": engine.noise.seed, "passes": engine.passes, "count": engine.count},
            {"decided": engine.codes, "accepted": engine.accepted},
            {"root": proposer.root, "root_count": proposer.count},
            x=embed.new_empty(rows, nodes, dim),
            features=embed.new_empty(rows, nodes, parts * dim),
            guided=embed.new_empty(batch, nodes, dim) if chain is None else chain.features,
            drafter=None if chain is None else _drafter(chain),
            verification=_verification(engine, budget, joint, levels, chain),
        )

    def run(self, first: int = DRAFT, last: int = COMMIT) -> None:
        """Stages `first` to `last` of a step."""
        threads = torch.get_num_threads()
        self.step.scratch = scratch(self.library.step_bytes(byref(self.step), threads))
        self.library.run_step(byref(self.step), first, last, threads)


def _pass(decoder: KernelDecoder, cache: Any, rows: int, nodes: int) -> dict[str, Any]:
    """A decoder, its cache, and room for the rotations, slots and masks of a pass."""
    slots = cache.kv.shape[4]
    return {
        "shape": decoder.shape,
        "layers": decoder.layers,
        "rotary": decoder.rotary_table,
        "positions": len(decoder.rotary_table),
        "slots": slots,
        "kv": cache.kv,
        "start": cache.start,
        "used": cache.used,
        "rotation": torch.empty(rows, nodes, *decoder.rotary_table.shape[1:]),
        "slot": torch.empty(rows, nodes, dtype=torch.int64),
        # a vector of the last mask may be read to its end
        "mask": torch.empty(rows * nodes * slots + 64, dtype=torch.uint8),
    }


def _drafter(chain: ChainState) -> Any:
    (batch, levels, dim), drafter, new = chain.hints.shape, chain.drafter, chain.hints.new_empty
    names = ("waiting", "next_embeds", "features", "hints", "prev")
    return Drafter(
        _pass(drafter.decoder.native, chain.cache, batch, 2 * levels),
        {"query_layers": drafter.native_inputs.layers, "heads": drafter.native.heads},
        {name: getattr(chain, name) for name in names},
        {name: new(batch, 2 * levels, dim) for name in ("all_hints", "x", "out")},
        level_features=new(batch * levels, dim),
        query=new(batch * levels, chain.prev.shape[1]),
        u=torch.empty(batch, levels, dtype=torch.float64),
    )


def _verification(
    engine: Engine, budget: NeighbourBudget, joint: bool, levels: int, chain: ChainState | None
) -> Any:
    batch, vocab, nodes, double = engine.batch, engine.target.vocab, levels + 1, torch.float64
    table = budget.table
    if table is not None:
        table = by_lanes(table) if joint else table.contiguous()
    work = verification(batch, nodes, vocab, 1, levels, engine.sampling.warp, budget, joint)
    children = torch.arange(1, nodes + 1).where(torch.arange(nodes) < levels, -1)
    given = {
        "logits": torch.empty(batch, nodes, vocab),
        "q": None if chain is None else chain.probs,
        "drawn": torch.empty(batch, nodes, dtype=torch.int64),
        "children": children.repeat(batch, 1),
        "u": torch.empty(batch, 1 if joint else levels, dtype=double),
        "last": torch.empty(batch, dtype=double),
        "limit": torch.tensor(budget.limits, dtype=double),
        "table": table,
    }
    for name, x in given.items():
        setattr(work, name, x)
    return work
