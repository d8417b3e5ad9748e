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
from lanternpp.trees.static import chain_tree
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
        max_nodes, max_children = builder.draws
        self.max_precomputed = max(self.max_precomputed, max_nodes * draws_of(max_children))

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """Build a proposer of the class that the drafter names, or of this class where it derives from that one."""
        kind = imported("proposer", parts.network.proposer) if isinstance(parts.network, Drafter) else cls
        return cls(parts.network, parts.tree) if issubclass(cls, kind) else kind(parts.network, parts.tree)

    @classmethod
    def draft_sampling(cls, parts: Parts) -> DraftSampling:
        """Return how the tree builder samples; earlier drafts have an influence through decided codes and features alone."""
        tree = parts.tree
        return DraftSampling(
            tree.chain, tree.drawn, "offers the likeliest codes instead of drawing them", tree.fixed
        )

    def grow(self, q: Tensor, extend: Extend, noise: Noise) -> Draft:
        """Grow a draft from q [B, V], the distribution of the root's children."""

        def children(q: Tensor, count: int, level: int) -> Tensor:
            if not self.builder.drawn:
                return self.sampling.likeliest(q, count)
            return self.sampling.children(q, count, noise, Noise.DRAFT + level)

        return self.builder.grow(self.root, q, extend, children)


class AutoregressiveProposer(NetworkProposer):
    """Runs its network once per level of the tree.

    The root is in the network's cache before a draft begins: the pass over the last decided codes returned the features
    that propose its children.
    """

    @abstractmethod
    def drafter_forward(self, codes: Tensor, features: Tensor, nodes: Nodes, cache: AttentionCache) -> Tensor:
        """Run the network over codes [B, N], with features [R, N, D] at their parents -> features [R, N, D]."""

    @property
    def head(self) -> Target:
        """The model whose head returns the logits of codes, and whose prompts the drafter's cache has slots for."""
        return self.target

    def open(self, target: Target, sampling: Sampling, guidance: Guidance, batch: int) -> None:
        """Allocate the drafter's cache and the features of the nodes of a draft."""
        super().open(target, sampling, guidance, batch)
        like, rows = next(self.drafter.parameters()), guidance.branches * batch
        config, scratch = self.drafter.decoder.config, self.builder.scratch
        slots = self.head.slots + target.length + max(scratch, self.depth + 1)
        self.cache = Cache(config, rows, slots, like)
        self.features = torch.zeros(rows, scratch, config.dim, dtype=like.dtype, device=like.device)
        self._path = chain_tree(rows, self.depth, like.device)
        self._row = torch.arange(rows, device=like.device)

    def propose(self, noise: Noise) -> Draft:
        """Grow a tree from the root."""
        q = self._probs(self.features[:, :1], torch.zeros_like(self.root[:, None]))[:, 0]
        return self.grow(q, self._extend, noise)

    def observe(self, output: TargetOutput) -> None:
        """Run the drafter over the decided codes, with the target's features in place of its own."""
        super().observe(output)
        rows = self.guidance.rows
        path, num_kept = rows(output.verdict.path), rows(output.verdict.kept)
        features = output.features.gather(1, path[..., None].expand(-1, -1, output.features.shape[-1]))
        nodes = self.cache.nodes(self._path.depth, self._path.mask)
        out = self.drafter_forward(output.verdict.next_codes, features, nodes, self.cache)
        self.features[:, 0] = out[self._row, (num_kept - 1).clamp(min=0)]
        self.cache.used += num_kept

    def _extend(self, frontier: Frontier) -> Tensor:
        """Expand nodes whose parents were expanded before; return the distributions of their children, [B, W, V]."""
        rows = self.guidance.rows
        node, parent = rows(frontier.node), rows(frontier.parent)
        nodes = self.cache.nodes(rows(frontier.depth) - 1, rows(frontier.mask), node)
        features = self.features[self._row[:, None], parent]
        out = self.drafter_forward(frontier.codes, features, nodes, self.cache)
        self.features[self._row[:, None], node] = out
        return self._probs(out, frontier.depth)

    def _probs(self, features: Tensor, depth: Tensor) -> Tensor:
        """Return the distributions of the children of nodes at depth [B, W], [B, W, V], from their features [R, W, D]."""
        index = (self.count[:, None] + depth).clamp(max=self.target.length - 1)
        logits = self.guidance.logits(self.head, features)
        return self.sampling.probs(self.target.constrain(logits, index))
