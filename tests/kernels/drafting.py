"""Drafters, drafts and their verification in C, for tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
from lanternpp.engine.sampling import Sampling
from lanternpp.kernels.binding import structs
from lanternpp.kernels.drafter import KernelDrafter
from lanternpp.kernels.linear import KernelLinear
from lanternpp.kernels.step import verification
from lanternpp.nn.decoder import DecoderConfig, grid_table
from lanternpp.trees.chain import chain_tree
from lanternpp.types import Draft, NeighbourBudget

HALF = torch.bfloat16
TAIL = [name for name, _ in structs.Node._fields_].index("tail")


def drafter_of(dim: int, hidden: int) -> ParallelDrafter:
    """A drafter with a layer for the confidence, in bfloat16."""
    config = ParallelConfig(DecoderConfig(dim, 1, 1, 32, head_dim=4), 2, hidden, confidence=True)
    return ParallelDrafter(config, grid_table(1, 4, 4).float()).to(HALF).requires_grad_(False)


def kernels_of(drafter: ParallelDrafter, head: Tensor, library: Any) -> KernelDrafter:
    """Its layers in C, with a head [V, D]."""
    return KernelDrafter(drafter, KernelLinear(library, [(head, None)]), library)


def empty_chain(batch: int, levels: int, vocab: int, survival: bool = False) -> Draft:
    """A draft with room for the codes of a chain, all of them the last code."""
    codes, probs = torch.full((batch, levels + 1), vocab - 1), torch.zeros(batch, levels + 1, vocab)
    return Draft(
        chain_tree(batch, levels, codes.device),
        codes,
        probs,
        torch.zeros(batch, levels) if survival else None,
    )


def jointly(
    library: Any, draft: Draft, logits: Tensor, budget: NeighbourBudget, u: Tensor, last: Tensor
) -> Any:
    """What the kernels write where they verify a draft jointly; node [B, N, 5]."""
    given = {"q": draft.probs, "drawn": draft.codes, "u": u, "last": last}
    work = verification(draft.tree, logits, Sampling().warp, budget, True, **given)
    work.run(library)
    return SimpleNamespace(**work.alive)
