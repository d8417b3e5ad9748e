"""Base classes of proposers that draft with a network: a drafter or a smaller target, with a KV cache of its own."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import torch
from torch import Tensor

from lanternpp.drafters.base import Drafter
from lanternpp.engine.cache import Cache
from lanternpp.engine.noise import Noise
from lanternpp.engine.proposer import DraftSampling, Parts, Proposer
from lanternpp.engine.sampling import Guidance, Sampling, draws_of
from lanternpp.models.base import Target
from lanternpp.nn.decoder import AttentionCache
from lanternpp.trees.base import Extend, TreeBuilder
from lanternpp.types import Draft, Frontier, Nodes, TargetOutput
from lanternpp.util.registry import imported


class NetworkProposer(Proposer):
    """Grows a draft tree; the network's distribution at a node proposes the node's children.

    `build` makes the class that a drafter names by its `proposer`, whatever proposer the settings name.
    """

    dials = frozenset({"tree", "verify"})
    drafter: Any

    def __init__(self, drafter: Drafter | Target, builder: TreeBuilder):
        self.drafter, self.builder = drafter, builder
        self.size, self.depth = builder.size, builder.depth
        nodes, children = builder.draws  # of the widest level
        self.numbers_ahead = max(self.numbers_ahead, nodes * draws_of(children))

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """From a network and a tree builder; the class is the drafter's `proposer`, or this one if it derives from that."""
        network = parts.network
        kind = imported("proposer", network.proposer) if isinstance(network, Drafter) else cls
        made: Self = (cls if issubclass(cls, kind) else kind)(network, parts.tree)
        return made

    @classmethod
    def draft_sampling(cls, parts: Parts) -> DraftSampling:
        """As the tree builder samples; earlier drafts have an influence through the decided codes and features alone."""
        tree = parts.tree
        return DraftSampling(
            tree.chain, tree.drawn, "offers the likeliest codes instead of drawing them", tree.fixed
        )

    def grow(self, q: Tensor, extend: Extend, noise: Noise) -> Draft:
        """q [B, V], the distribution of the root's children -> a draft."""

        def children(q: Tensor, count: int, level: int) -> Tensor:
            if not self.builder.drawn:
                return self.sampling.likeliest(q, count)
            return self.sampling.children(q, count, noise, Noise.DRAFT + level)

        return self.builder.grow(self.root, q, extend, children)


class AutoregressiveProposer(NetworkProposer):
    """Runs its network once per level of the tree.

    The root is in the network's cache before a draft begins: the pass over the codes decided last gave the features
    that propose its children.
    """

    @abstractmethod
    def drafter_forward(self, codes: Tensor, below: Tensor, nodes: Nodes, cache: AttentionCache) -> Tensor:
        """A pass over codes [B, N], with the features `below` [R, N, D] at their parents -> features [R, N, D]."""

    @property
    def head(self) -> Target:
        """The model whose head gives the logits of the codes' children, and whose prompts the drafter's cache has room for."""
        return self.target

    def open(self, target: Target, sampling: Sampling, guidance: Guidance, batch: int) -> None:
        """Allocate the drafter's cache and the features of the nodes of a draft."""
        super().open(target, sampling, guidance, batch)
        like, rows = next(self.drafter.parameters()), guidance.branches * batch
        shape = self.drafter.decoder.config
        room = self.head.slots + target.length + max(self.builder.scratch, self.depth + 1)
        self.cache = Cache(shape, rows, room, like)
        self.features = torch.zeros(
            rows, self.builder.scratch, shape.dim, dtype=like.dtype, device=like.device
        )
        kept = torch.ones(self.depth + 1, self.depth + 1, dtype=torch.bool, device=like.device).tril()
        self._kept_mask = kept.expand(rows, -1, -1)
        self._kept_depth = torch.arange(self.depth + 1, device=like.device).expand(rows, -1)
        self._row = torch.arange(rows, device=like.device)

    def propose(self, noise: Noise) -> Draft:
        """Grow a tree from the root."""
        q = self._probs(self.features[:, :1], torch.zeros_like(self.root[:, None]))[:, 0]
        return self.grow(q, self._extend, noise)

    def observe(self, output: TargetOutput) -> None:
        """Run the drafter over the decided codes, with the target's features in place of its own."""
        super().observe(output)
        rows = self.guidance.rows
        path, kept = rows(output.verdict.path), rows(output.verdict.kept)
        features = output.features.gather(1, path[..., None].expand(-1, -1, output.features.shape[-1]))
        nodes = self.cache.nodes(self._kept_depth, self._kept_mask)
        out = self.drafter_forward(output.verdict.next_codes, features, nodes, self.cache)
        self.features[:, 0] = out[self._row, (kept - 1).clamp(min=0)]
        self.cache.used += kept

    def _extend(self, at: Frontier) -> Tensor:
        """Expand nodes whose parents were expanded before -> the distributions of their children, [B, W, V]."""
        rows = self.guidance.rows
        node, parent = rows(at.node), rows(at.parent)
        nodes = self.cache.nodes(rows(at.depth) - 1, rows(at.mask), node)
        below = self.features[self._row[:, None], parent]
        out = self.drafter_forward(at.codes, below, nodes, self.cache)
        self.features[self._row[:, None], node] = out
        return self._probs(out, at.depth)

    def _probs(self, features: Tensor, depth: Tensor) -> Tensor:
        """Features [R, W, D] of nodes at depth [B, W] -> the distributions of their children, [B, W, V]."""
        index = (self.count[:, None] + depth).clamp(max=self.target.length - 1)
        logits = self.guidance.logits(self.head, features)
        return self.sampling.probs(self.target.constrain(logits, index))
