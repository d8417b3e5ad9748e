"""Trees that follow the drafter's confidence (EAGLE-2, arXiv 2406.16858, sections 4.1 and 4.2; DDD, arXiv 2409.00142)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.trees.base import Children, Extend, TreeBuilder
from lanternpp.types import Draft, Frontier, Tree, on_host

NEVER = float("-inf")


class DynamicTree(TreeBuilder):
    """Trees that expand a beam of the likeliest nodes level by level, and keep the likeliest of all nodes.

    A node's likelihood is the product of q along its path. Every node of the beam offers its `beam` likeliest codes; the best
    `beam` nodes of a level are expanded. The best `nodes` of all offered nodes become the draft. Sums of log q only fall on
    the way down and ties go to the smaller number, so the ancestors of a kept node are kept. Children are a top-k, not drawn:
    point masses (`Draft.probs` None). If fewer than `nodes` have a likelihood above 0, the draft is padded by nodes below the
    root that are in no child list, so that verification never tries them.

    start, threshold: dynamic depth decoding stops drafting at a level where the beam has little likelihood left. The log-sum-exp
    of the beam's summed log q is the log of the drafter's probability that the decoded path runs through the beam. From level
    `start` on, a sample stops once this log is below `threshold`. On a CPU levels at which every sample has stopped are not
    computed; on other devices they are computed and discarded.
    """

    def __init__(
        self, beam: int = 10, depth: int = 6, nodes: int = 59, start: int = 1, threshold: float = NEVER
    ):
        if min(beam, depth, start) < 1:
            raise InputError(
                f"beam {beam}, depth {depth} and start {start} of a dynamic tree must be 1 or more"
            )
        self.beam, self.depth = beam, depth
        self.start = start if threshold > NEVER else depth
        self.threshold = threshold
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

    def grow(self, root: Tensor, q: Tensor, extend: Extend, children: Children) -> Draft:
        """Grow a draft from root [B] and q [B, V]; the drafter expands one beam per level."""
        if q.shape[-1] < self.beam:
            raise InputError(
                f"a dynamic tree with a beam of {self.beam} needs as many codes; got {q.shape[-1]}"
            )
        return self._select(root, *self._expand(q, extend, children))

    def _expand(self, q: Tensor, extend: Extend, children: Children) -> tuple[Tensor, Tensor, Tensor]:
        """Offer `beam` children of the root, then of every node of each level's beam: C nodes, whose numbers are their columns.

        Return their codes, the numbers of their parents, -1 for the root, and their scores, log q summed along the path and
        -inf where no node is offered, [B, C] each.
        """
        batch, beam = len(q), self.beam
        offered_code = torch.zeros(batch, self.offers, dtype=torch.int64, device=q.device)
        offered_parent = offered_code - 1
        offered_score = torch.full((batch, self.offers), NEVER, dtype=q.dtype, device=q.device)
        rank = torch.arange(beam, device=q.device)
        # The beam: W nodes, at first the root alone. Slots are those of the drafter's cache.
        slot = torch.zeros_like(offered_code[:, :1])  # [B, W]
        number = slot - 1  # [B, W]
        score = torch.zeros(batch, 1, dtype=q.dtype, device=q.device)  # [B, W]
        mask = torch.zeros(batch, 1, self.scratch, dtype=torch.bool, device=q.device)  # [B, W, slots]
        level_q = q[:, None]  # [B, W, V]
        offset = 0  # number of the level's first node
        for depth in range(1, self.depth + 1):
            codes = children(level_q, beam, depth)  # [B, W, beam]
            scores = (score[..., None] + level_q.gather(-1, codes).log()).flatten(1)  # [B, W beam]
            level = slice(offset, offset + scores.shape[1])
            offered_code[:, level] = codes.flatten(1)
            offered_parent[:, level] = number[..., None].expand_as(codes).flatten(1)
            offered_score[:, level] = scores
            if depth == self.depth:
                break
            sorted_scores, order = scores.sort(dim=-1, descending=True, stable=True)
            score, best = sorted_scores[:, :beam], order[:, :beam]
            if depth >= self.start:
                stop = score.logsumexp(-1) < self.threshold  # [B]
                score = score.masked_fill(stop[:, None], NEVER)
                if on_host(q) and stop.all():
                    break
            number = offset + best
            parent = best // beam  # [B, beam] index in the beam above
            parent_slot = slot.gather(1, parent)
            slot = (1 + (depth - 1) * beam + rank).expand(batch, -1)
            mask = mask.gather(1, parent[..., None].expand(-1, -1, self.scratch))
            mask = mask.scatter(2, slot[..., None], True)
            code = codes.flatten(1).gather(1, best)
            level_q = extend(Frontier(code, slot, parent_slot, depth, torch.full_like(slot, depth), mask))
            offset = level.stop
        return offered_code, offered_parent, offered_score

    def _select(self, root: Tensor, code: Tensor, parent: Tensor, score: Tensor) -> Draft:
        """Make a draft of the best nodes of all, in the order they were offered: parents first. Arguments as `_expand` returns."""
        batch, beam = len(root), self.beam
        best = score.sort(dim=-1, descending=True, stable=True).indices[:, : self.size - 1]
        best = best.sort(-1).values  # [B, N - 1] numbers of the nodes 1, 2 ..
        real = score.gather(1, best) > NEVER  # False: padding
        ids = torch.arange(1, self.size, device=root.device).expand(batch, -1)
        id_of = torch.zeros_like(code).scatter(1, best, ids)  # [B, C] node ids by number
        parent_number = parent.gather(1, best)
        parent = id_of.gather(1, parent_number.clamp(min=0)).where(real & (parent_number >= 0), 0)
        parent = torch.cat((torch.full_like(root[:, None], -1), parent), 1)
        # The first level has the numbers below `beam`, every later level the next beam * beam numbers.
        depth = (1 + (best + beam * (beam - 1)) // (beam * beam)).where(real, 1)
        depth = torch.cat((torch.zeros_like(root[:, None]), depth), 1)
        codes = code.gather(1, best).where(real, root[:, None])
        children = torch.full((batch, self.size, beam + 1), -1, dtype=torch.int64, device=root.device)
        # A child's column is its rank, best % beam; the last column takes the padding and is dropped.
        index = parent[:, 1:] * (beam + 1) + (best % beam).where(real, beam)
        children.flatten(1).scatter_(1, index, ids)
        tree = Tree(parent, depth, children[..., :beam], self._mask(parent), (beam,) * self.depth)
        return Draft(tree, torch.cat((root[:, None], codes), 1), None)

    def _mask(self, parent: Tensor) -> Tensor:
        """Return the mask [B, N, N] of parent [B, N], True at a node and its ancestors."""
        mask = torch.eye(self.size, dtype=torch.bool, device=parent.device).repeat(len(parent), 1, 1)
        parent = parent.clamp(min=0)
        ancestor = parent
        for _ in range(self.depth):
            mask.scatter_(2, ancestor[..., None], True)
            ancestor = parent.gather(1, ancestor)
        return mask


SMALLER = DynamicTree(10, 5, 58)  # LANTERN's (arXiv 2410.03355): five levels, 59 nodes with the root
# The threshold is about the cost of a level: the time of a one-layer drafter's pass relative to its target's.
DYNAMIC_DEPTH = DynamicTree(depth=8, start=2, threshold=math.log(0.05))
