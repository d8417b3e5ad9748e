"""A drafter and a tree builder: EAGLE's way of guessing ahead (arXiv 2401.15077, section 3)."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from lanternpp.drafters.base import Drafter
from lanternpp.engine.cache import Cache
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.proposers.base import Parts, Proposer
from lanternpp.targets.base import Target
from lanternpp.trees.base import TreeBuilder
from lanternpp.types import Draft, Frontier, Look, Prompt


class TreeProposer(Proposer):
    """Feeds the drafter the target's features where they are known and its own where they are not.

    The drafter's input at a position pairs the target's feature there with the code one ahead, so its
    cache runs one position behind the target's: the root is already in it.
    """

    def __init__(self, drafter: Drafter, builder: TreeBuilder):
        self.drafter, self.builder = drafter, builder
        self.size, self.depth = builder.size, builder.depth

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """From a drafter and a tree builder."""
        return cls(parts.drafter(), parts.tree())

    def open(self, target: Target, sampling: Sampling, guidance: Guidance, batch: int) -> None:
        """Make room for a batch: the drafter's cache and the features of the nodes of a draft."""
        super().open(target, sampling, guidance, batch)
        self.target, self.sampling, self.guidance = target, sampling, guidance
        like = next(self.drafter.parameters())
        rows, shape = guidance.branches * batch, self.drafter.decoder.config
        room = target.slots + target.length + max(self.builder.scratch, self.depth + 1)
        self.cache = Cache(shape, rows, room, like)
        self.features = torch.zeros(
            rows, self.builder.scratch, shape.dim, dtype=like.dtype, device=like.device
        )
        kept = torch.ones(self.depth + 1, self.depth + 1, dtype=torch.bool, device=like.device).tril()
        self._kept_mask = kept.expand(rows, -1, -1)
        self._kept_depth = torch.arange(self.depth + 1, device=like.device).expand(rows, -1)
        self._row = torch.arange(rows, device=like.device)

    def begin(self, slot: int, rows: Tensor, prompt: Prompt, features: Tensor, root: Tensor) -> None:
        """Prefill the drafter with the prompt's features, each beside the input one ahead."""
        super().begin(slot, rows, prompt, features, root)
        first = self.target.embed(root[:, None]).expand(len(rows), -1, -1)
        ahead = torch.cat((self.drafter.sees(prompt.embeds[:, 1:].to(first.dtype)), first), 1)
        memory = self.cache.rows(rows, prompt.start, features.shape[1])
        self.features[rows, 0] = self.drafter(ahead, features, memory.nodes(), memory)[:, -1]

    def propose(self, noise: Noise) -> Draft:
        """Grow a tree from the root."""

        def children(q: Tensor, count: int, level: int) -> Tensor:
            return self.sampling.children(q, count, noise, Noise.DRAFT + level)

        root = self._probs(self.features[:, :1])[:, 0]
        return self.builder.grow(self.root, root, self._extend, children)

    def observe(self, look: Look) -> None:
        """Run the drafter over the kept nodes with the target's own features."""
        super().observe(look)
        rows = self.guidance.rows
        path, kept = rows(look.verdict.path), rows(look.verdict.kept)
        features = look.features.gather(1, path[..., None].expand(-1, -1, look.features.shape[-1]))
        nodes = self.cache.nodes(self._kept_depth, self._kept_mask)
        out = self.drafter(self.target.embed(rows(look.verdict.ahead)), features, nodes, self.cache)
        self.features[:, 0] = out[self._row, (kept - 1).clamp(min=0)]
        self.cache.used += kept

    def _extend(self, at: Frontier) -> Tensor:
        """Look beyond nodes whose parents were looked beyond before."""
        rows = self.guidance.rows
        node, parent = rows(at.node), rows(at.parent)
        nodes = self.cache.nodes(rows(at.depth) - 1, rows(at.mask), node)
        below = self.features[self._row[:, None], parent]
        out = self.drafter(rows(self.target.embed(at.codes)), below, nodes, self.cache)
        self.features[self._row[:, None], node] = out
        return self._probs(out)

    def _probs(self, features: Tensor) -> Tensor:
        """Features [R, W, D] -> what children are drawn from, [B, W, V]."""
        return self.sampling.probs(self.guidance.merge(self.target.head(features)))
