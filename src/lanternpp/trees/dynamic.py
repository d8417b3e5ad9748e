"""Trees that follow the drafter's confidence (EAGLE-2, arXiv 2406.16858, sections 4.1 and 4.2; DDD, arXiv 2409.00142)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.trees.base import Children, Extend, TreeBuilder
from lanternpp.types import Draft, Frontier, Tree, on_host

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class _Offers:
    """All the nodes offered so far, C of them, level by level; a node's number is its column."""

    code: Tensor  # [B, C]
    above: Tensor  # [B, C] number of the parent, -1 for the root
    score: Tensor  # [B, C] summed log q; -inf: not offered


class DynamicTree(TreeBuilder):
    """A beam of the likeliest nodes is expanded level by level; the likeliest of all nodes are kept.

    A node's likelihood is the product of q along its path. Every node of the beam offers its `beam`
    likeliest codes; the best `beam` of a level are expanded. Of all nodes offered the best `nodes`
    become the draft. Sums of log q only fall on the way down and ties go to the smaller number, so the
    ancestors of a kept node are kept. Children are a top-k, not drawn: point masses (`Draft.probs` None).
    Where fewer nodes have a likelihood above 0, the rest of the draft is padding: nodes below the root that are in no
    child list, so that verification never tries them.
    """

    def __init__(self, beam: int = 10, depth: int = 5, nodes: int = 59):
        if beam < 1 or depth < 1:
            raise InputError(f"beam {beam} and depth {depth} of a dynamic tree must be 1 or more")
        self.beam, self.depth = beam, depth
        self.offers = beam + (depth - 1) * beam * beam
        if not 1 <= nodes <= self.offers:
            raise InputError(
                f"{nodes} nodes: beam {beam} and depth {depth} offer {self.offers}; use 1 to {self.offers}"
            )
        if nodes < depth:
            raise InputError(
                f"{nodes} nodes cannot reach depth {depth}; use {depth} or more, or a smaller depth"
            )
        self.size = nodes + 1
        self.scratch = 1 + (depth - 1) * beam

    def enough(self, depth: int, beam: Tensor) -> Tensor | None:
        """Which samples [B] stop below `depth`, given the beam's summed log q [B, beam]; None: none."""
        return None

    def grow(self, root: Tensor, q: Tensor, extend: Extend, children: Children) -> Draft:
        """root [B], q [B, V] -> a draft; the drafter expands one beam per level."""
        if q.shape[-1] < self.beam:
            raise InputError(
                f"a dynamic tree with a beam of {self.beam} needs as many codes; got {q.shape[-1]}"
            )
        return self._select(root, self._expand(q, extend, children))

    def _expand(self, q: Tensor, extend: Extend, children: Children) -> _Offers:
        """Offer `beam` children of the root, then of every node of each level's beam."""
        batch, wide = len(q), self.beam
        none = torch.zeros(batch, self.offers, dtype=torch.int64, device=q.device)
        scores = torch.full((batch, self.offers), NEVER, dtype=q.dtype, device=q.device)
        offers = _Offers(none, none - 1, scores)
        rank = torch.arange(wide, device=q.device)
        slot = torch.zeros_like(none[:, :1])  # scratch slots of the expanded nodes; 0 is the root's
        number = slot - 1
        seen = torch.zeros(batch, 1, self.scratch, dtype=torch.bool, device=q.device)
        score, first = torch.zeros(batch, 1, dtype=q.dtype, device=q.device), 0
        level_q = q[:, None]
        for depth in range(1, self.depth + 1):
            codes = children(level_q, wide, depth)  # [B, W, beam]
            likely = level_q.gather(-1, codes)
            last = first + likely[0].numel()
            scores = score[..., None] + likely.log()
            offers.code[:, first:last] = codes.flatten(1)
            offers.above[:, first:last] = number[..., None].expand_as(codes).flatten(1)
            offers.score[:, first:last] = scores.flatten(1)
            if depth == self.depth:
                break
            ordered, order = scores.flatten(1).sort(dim=-1, descending=True, stable=True)
            score, best = ordered[:, :wide], order[:, :wide]
            stop = self.enough(depth, score)
            if stop is not None:
                score = score.masked_fill(stop[:, None], NEVER)
                if on_host(q) and stop.all():
                    break
            parent = best // wide  # of the beam above
            number = first + best
            above, slot = slot.gather(1, parent), (1 + (depth - 1) * wide + rank).expand(batch, -1)
            seen = seen.gather(1, parent[..., None].expand(-1, -1, self.scratch))
            seen = seen.scatter(2, slot[..., None], True)
            code = codes.flatten(1).gather(1, best)
            level_q = extend(Frontier(code, slot, above, depth, torch.full_like(slot, depth), seen))
            first = last
        return offers

    def _select(self, root: Tensor, offers: _Offers) -> Draft:
        """The best nodes of all, in the order they were offered: parents first."""
        batch, count, wide = len(root), self.size - 1, self.beam
        best = offers.score.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        best = best.sort(-1).values  # [B, count]
        real = offers.score.gather(1, best) > NEVER
        ids = torch.arange(1, self.size, device=root.device).expand(batch, -1)
        node = torch.zeros_like(offers.code).scatter(1, best, ids)  # a number's node id
        above = offers.above.gather(1, best)
        parent = node.gather(1, above.clamp(min=0)).where(real & (above >= 0), 0)
        parent = torch.cat((torch.full_like(root[:, None], -1), parent), 1)
        depth = (1 + (best + wide * (wide - 1)) // (wide * wide)).where(real, 1)
        depth = torch.cat((torch.zeros_like(root[:, None]), depth), 1)
        codes = offers.code.gather(1, best).where(real, root[:, None])
        table = torch.full((batch, self.size, wide + 1), -1, dtype=torch.int64, device=root.device)
        # The last column takes the padding and is dropped.
        place = parent[:, 1:] * (wide + 1) + (best % wide).where(real, wide)
        table.flatten(1).scatter_(1, place, ids)
        tree = Tree(parent, depth, table[..., :wide], self._mask(parent), (wide,) * self.depth)
        return Draft(tree, torch.cat((root[:, None], codes), 1), None)

    def _mask(self, parent: Tensor) -> Tensor:
        """parent [B, N] -> [B, N, N], True at a node and its ancestors."""
        mask = torch.eye(self.size, dtype=torch.bool, device=parent.device).repeat(len(parent), 1, 1)
        above = parent.clamp(min=0)
        climb = above
        for _ in range(self.depth):
            mask.scatter_(2, climb[..., None], True)
            climb = above.gather(1, climb)
        return mask


SMALLER = DynamicTree(10, 5, 58)  # LANTERN's (arXiv 2410.03355): 59 nodes with the root


class DepthTree(DynamicTree):
    """Dynamic depth decoding: stops drafting at a level where the beam has little likelihood left.

    The log-sum-exp of the beam's summed log q is the drafter's probability that the decoded path runs
    through the beam at all. From level `start` on, a sample stops once that falls below `threshold`. The default, 5 %,
    is about the cost of a level: the time of a one-layer drafter's pass relative to its target's. On a CPU levels at
    which every sample has stopped are not computed; on other devices they are computed and discarded.
    """

    def __init__(
        self,
        beam: int = 10,
        depth: int = 8,
        nodes: int = 59,
        start: int = 2,
        threshold: float = math.log(0.05),
    ):
        super().__init__(beam, depth, nodes)
        if start < 1:
            raise InputError(f"start {start} is below 1; the first level to stop at is 1")
        self.start, self.threshold = start, threshold

    def enough(self, depth: int, beam: Tensor) -> Tensor | None:
        """The samples whose beam holds less than the threshold."""
        return beam.logsumexp(-1) < self.threshold if depth >= self.start else None
