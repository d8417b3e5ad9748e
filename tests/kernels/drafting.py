"""Drafters, drafts and their verification in C, for tests."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from helpers.toys import noise
from torch import Tensor

from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.kernels.binding import structs
from lanternpp.kernels.linear import KernelLinear
from lanternpp.kernels.packing import KernelDrafter
from lanternpp.kernels.step import verification
from lanternpp.nn.decoder import DecoderConfig, grid_table
from lanternpp.proposers.parallel import _masked
from lanternpp.trees.dynamic import DynamicTree
from lanternpp.trees.static import StaticTree, chain_tree
from lanternpp.types import Draft, NeighbourBudget

HALF, NEVER = torch.bfloat16, float("-inf")
TAIL = [name for name, _ in structs.Node._fields_].index("tail")


def drafter_of(dim: int, hidden: int, aux_layers: tuple[int, ...] = ()) -> ParallelDrafter:
    """A drafter in bfloat16."""
    decoder = DecoderConfig(dim, 1, 1, 32, head_dim=4)
    config = ParallelConfig(decoder, 2, hidden, aux_layers=aux_layers)
    return ParallelDrafter(config, grid_table(1, 4, 4).float()).to(HALF).requires_grad_(False)


def empty_chain(batch: int, levels: int, vocab: int) -> Draft:
    """A draft with room for the codes of a chain, all of them the last code."""
    codes, probs = torch.full((batch, levels + 1), vocab - 1), torch.zeros(batch, levels + 1, vocab)
    return Draft(chain_tree(batch, levels, codes.device), codes, probs)


class Turn:
    """Random weights and inputs of the sampling of a drafter."""

    def __init__(
        self, vocab: int, batch: int, strong: float = 1 / 3, dim: int = 64, hidden: int = 32, levels: int = 4
    ):
        torch.manual_seed(vocab + batch)
        self.drafter = drafter_of(dim, hidden)
        self.head = (torch.randn(vocab, dim) * strong).to(HALF)
        self.features = torch.randn(batch, levels, dim).to(HALF)
        self.query = torch.randn(batch, levels, hidden).to(HALF)
        self.prev = torch.randn(vocab, hidden).to(HALF)
        self.u = torch.rand(batch, levels, dtype=torch.float64)
        self.forbidden: Tensor | None = None

    def drawn(self, library: Any, sampling: Sampling, rows: slice = slice(None)) -> Draft:
        """The chains of some pictures, in C."""
        u = self.u[rows]
        draft = empty_chain(*u.shape, len(self.head))
        forbidden = None if self.forbidden is None else self.forbidden[rows]
        inputs = {"features": self.features[rows], "query": self.query[rows], "prev": self.prev}
        made = KernelDrafter(self.drafter, KernelLinear(library, [(self.head, None)]), library)
        assert made.sample(draft, sampling.warp, **inputs, bias=forbidden, u=u)
        return draft


def jointly(
    library: Any, draft: Draft, logits: Tensor, budget: NeighbourBudget, u: Tensor, last: Tensor
) -> Any:
    """What the kernels write when they verify a draft jointly; node [B, N, 5]."""
    given = {"q": draft.probs, "drawn": draft.codes, "u": u, "last": last}
    work = verification(draft.tree, logits, Sampling().warp, budget, True, **given)
    work.run(library)
    return SimpleNamespace(**work.alive)


def drafted(builder: StaticTree | DynamicTree, batch: int, vocab: int) -> tuple[Draft, Tensor]:
    """A draft, and the target's logits at its nodes; some codes are forbidden at some nodes, and the root of some is forced."""
    common = torch.randn(batch, builder.size, vocab)
    logits = common + 0.7 * torch.randn(batch, builder.size, vocab)
    logits[: batch // 4, 1, 1::2] = NEVER
    logits[: batch // 8, 0, 1:] = NEVER
    q, rows = common.softmax(-1), torch.arange(batch)[:, None]

    def children(q: Tensor, count: int, level: int) -> Tensor:
        if not builder.drawn:
            return Sampling().likeliest(q, count)
        return Sampling().children(q, count, noise(batch), Noise.DRAFT + level)

    root = torch.zeros(batch).long()
    draft = builder.grow(root, q[:, 0], lambda at: q[rows, at.node % builder.size], children)
    if draft.tree.chain:  # chains of a batch end at different places
        lengths = 1 + torch.arange(batch) % draft.tree.depth.shape[1]
        draft = replace(draft, tree=_masked(draft.tree, lengths, torch.arange(builder.size)))
    return draft, logits
