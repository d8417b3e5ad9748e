"""Which engines take whole steps in one call of the kernels: those whose parts are all known there."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lanternpp.engine.decode import Engine
from lanternpp.engine.proposer import CacheState, ChainState
from lanternpp.engine.verify.choose import TOKEN
from lanternpp.kernels.chain import NativeChain, NativeInputs
from lanternpp.kernels.decoder import KernelDecoder
from lanternpp.kernels.sampling import NativeHead
from lanternpp.kernels.step import Method, NativeStep, Samples
from lanternpp.models.base import Target

MOST_EMBEDDINGS = 1 << 26  # numbers of a table of embeddings, which is kept once more
_tables: WeakKeyDictionary[Target, Tensor] = WeakKeyDictionary()


@torch.inference_mode()
def fused_step(engine: Engine, verify: str) -> NativeStep | None:
    """The whole steps of a new engine in C; None where a part of it is unknown there. verify: the name of its verifier.

    Neither measured steps nor the greedy choice are known there, and no target that constrains its codes.
    """
    target, proposer, sampling = engine.target, engine.proposer, engine.sampling
    decoder, head = target.decoder.native, target.native_head
    if type(engine) is not Engine or engine.measure_tv or sampling.greedy:
        return None
    if not isinstance(decoder, KernelDecoder) or not isinstance(head, NativeHead):
        return None
    plain = type(target).constrain is Target.constrain and type(target).forward is Target.forward
    fits = decoder.takes(engine.cache.kv) and engine.cache.kv.dtype == torch.bfloat16
    offered = proposer.chain_state()
    budget = engine.rule.as_numbers(proposer.depth)
    joint = verify != TOKEN
    if not plain or not fits or offered is None or budget is None or not _known(offered[0]):
        return None
    if joint and not (engine.rule.lossless or budget.optimal):
        return None
    samples = Samples(
        *(engine.noise.seed, engine.passes, engine.count, engine.codes, engine.accepted),
        *(proposer.root, proposer.count),
    )
    method = Method(engine.guidance.branches, engine.guidance.scale, sampling.warp, budget, joint)
    cache = CacheState(engine.cache.kv, engine.cache.start, engine.cache.used)
    table = _embeddings(target)
    if table is None:
        return None
    return NativeStep(decoder, head, table, cache, samples, method, target.length, offered[0])


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
