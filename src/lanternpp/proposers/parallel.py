"""A parallel drafter and a tree builder: one pass of the drafter for all of a draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from lanternpp.drafters.parallel import ParallelDrafter
from lanternpp.engine.cache import Cache
from lanternpp.engine.noise import Noise
from lanternpp.engine.proposer import Parts
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.proposers.network import NetworkProposer
from lanternpp.trees.base import TreeBuilder
from lanternpp.trees.static import chain_tree, is_drawn_chain
from lanternpp.types import Admission, Draft, Frontier, TargetOutput, Tree, on_host


class Parallel(NetworkProposer):
    """One drafter pass per draft, over the codes decided since the last draft and one query per level.

    Its cache has one row per sample and holds one position less than the target's, as EAGLE's does. The codes of the last
    verdict wait in `next_embeds`, with the target's guided features, until the next draft; `waiting` counts them.

    min_survival: a chain ends before the first code whose predicted probability to be kept, together with all codes before
    it, is lower than this; it has one code at least. The prediction for a code reads the codes before it and none that is
    drawn later. So the end of a chain is a stopping time, and the code drawn after the end is the target's, as after any chain of
    this length: the distribution of the pictures is the same. All chains of a batch have the nodes of the longest chain;
    nodes after the end of a shorter chain are no children. 0: chains have all codes, and nothing is predicted.
    """

    needs = "parallel"
    dials = frozenset({"tree", "verify", "min_survival"})
    drafter: ParallelDrafter
    min_survival: float = 0.0

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """Build the proposer; InputError where `min_survival` is set and the drafter predicts no probability to be kept."""
        proposer = super().build(parts)
        if parts.min_survival:
            if not isinstance(proposer, Parallel) or proposer.drafter.confidence is None:
                raise InputError(
                    f"min_survival {parts.min_survival} needs a parallel drafter that predicts which codes are kept, and this one does "
                    "not; train it again with `lanternpp train --kind parallel`, or leave min_survival out"
                )
            proposer.min_survival = parts.min_survival
        return proposer

    @property
    def aux_layers(self) -> tuple[int, ...]:  # type: ignore[override]
        """The layers of the target that its drafter reads."""
        return self.drafter.aux_layers

    def open(self, target: Target, sampling: Sampling, guidance: Guidance, batch: int) -> None:
        """Allocate the drafter's cache and the inputs that the next draft starts with."""
        super().open(target, sampling, guidance, batch)
        like, depth, config = next(self.drafter.parameters()), self.depth, self.drafter.decoder.config
        max_inputs = 2 * depth  # waiting inputs, at most depth + 1, and depth - 1 queries
        self.cache = Cache(config, batch, target.slots + target.length + max_inputs, like)
        self.next_embeds = torch.zeros(batch, depth + 1, config.dim, dtype=like.dtype, device=like.device)
        self.features = self.next_embeds.repeat(1, 1, 1 + len(self.aux_layers))
        self.hints = torch.zeros_like(self.next_embeds[:, 1:])  # [B, depth, D] of the features of every level
        self.waiting = torch.zeros_like(self.root)
        codes = torch.arange(target.vocab, device=like.device)
        # [V, H], the `prev_code` of `combine` for every code
        self.prev_code_table = self.drafter.before(target.embed(codes).to(like.dtype))
        self._whole_chain = is_drawn_chain(self.builder)
        self.supports_fused_steps = type(self) is Parallel and self._whole_chain and not self.min_survival
        if self._whole_chain:
            dtype = like.dtype if like.element_size() == 8 else torch.float32
            self.probs_of_nodes = torch.zeros(batch, depth + 1, target.vocab, dtype=dtype, device=like.device)
            self._trees = {depth: chain_tree(batch, depth, like.device)}  # by depth
        self._row = torch.arange(batch, device=like.device)
        self._arange = torch.arange(max_inputs, device=like.device)
        self._layouts = {depth + 1: layout(depth + 1, depth + 1, self._arange)}  # by `max_waiting`

    def begin(self, new: Admission) -> None:
        """Prefill with the prompt's guided features, each paired with the conditional input at the next position."""
        super().begin(new)
        like = self.next_embeds
        features = self.guidance.merge(new.features).to(like.dtype)
        root = self.target.embed(new.root[:, None]).to(like.dtype)
        next_embeds = torch.cat((new.prompt.embeds[:1, 1:].to(like.dtype), root), 1)
        slot = self._row[new.slot : new.slot + 1]
        prompt_cache = self.cache.rows(slot, new.prompt.start[:1], features.shape[1])
        prompt_cache.prefill(self.drafter, next_embeds, features)
        self.cache.used[slot] -= 1  # the next pass runs the last input again, with the queries after it
        self.next_embeds[slot, 0], self.features[slot, 0] = next_embeds[:, -1], features[:, -1]
        self.hints[slot] = 0
        self.waiting[slot] = 1

    def propose(self, noise: Noise) -> Draft:
        """Run the drafter once, then grow a tree, whose nodes cost one product with the head each."""
        levels = self._drafter_forward()  # [B, depth, D]
        query = self.drafter.down(levels)
        chain = self._sample_natively(levels, query, noise)
        if chain is not None:
            return chain
        index = self._index()
        if self.min_survival:
            return self._sample_chain(levels, query, index, noise)

        def extend(frontier: Frontier) -> Tensor:
            level = slice(frontier.level, frontier.level + 1)
            prev_code = self.prev_code_table[frontier.codes]
            conditioned = self.drafter.combine(levels[:, level], query[:, level], prev_code)
            return self._probs(conditioned, index[:, level])

        q = self._probs(levels[:, :1], index[:, :1])[:, 0]
        return self.grow(q, extend, noise)

    def _sample_natively(self, levels: Tensor, query: Tensor, noise: Noise) -> Draft | None:
        """Sample a chain by kernels, from levels [B, depth, D] and query [B, depth, H]; None where they do not sample it."""
        native = self.drafter.native
        if native is None or not self._whole_chain or self.min_survival or not on_host(levels):
            return None
        draft, bias = self._empty_chain(), None
        if type(self.target).constrain is not Target.constrain:
            bias = self.target.constrain(torch.zeros_like(self.probs_of_nodes[:, 1:]), self._index())
        u = noise.draft_uniform(self.depth)
        tensors = {"features": levels, "query": query, "prev": self.prev_code_table, "bias": bias, "u": u}
        return draft if native.sample(draft, self.sampling.warp, **tensors) else None

    def _sample_chain(self, levels: Tensor, query: Tensor, index: Tensor, noise: Noise) -> Draft:
        """Sample a chain that `min_survival` ends, from levels [B, depth, D], query [B, depth, H] and index [B, depth]."""
        draft = self._empty_chain()
        assert draft.probs is not None and draft.survival is not None and self.drafter.confidence is not None
        survival = torch.ones_like(draft.survival[:, 0])
        for level in range(self.depth):
            features = levels[:, level]
            if level:
                prev_code = self.prev_code_table[draft.codes[:, level]]
                features = self.drafter.combine(features, query[:, level], prev_code)
            confidence = self.drafter.confidence(features)[:, 0].to(survival.dtype).sigmoid()
            survival = confidence * survival
            if level and features.device.type == "cpu" and not (survival >= self.min_survival).any():
                break
            draft.survival[:, level] = survival
            q = self._probs(features[:, None], index[:, level, None])
            draft.probs[:, level] = q[:, 0]
            draft.codes[:, level + 1] = self.sampling.children(q, 1, noise, Noise.DRAFT + level)[:, 0, 0]
        return self._ended(draft)

    def _empty_chain(self) -> Draft:
        """Return a chain of all levels, with the root as the code of every node."""
        survival = self.probs_of_nodes.new_zeros(len(self.root), self.depth) if self.min_survival else None
        codes = self.root[:, None].expand(-1, self.size).contiguous()
        return Draft(self._trees[self.depth], codes, self.probs_of_nodes, survival)

    def _ended(self, draft: Draft) -> Draft:
        """Return the chains of a batch without the nodes after the end of the longest chain."""
        assert draft.survival is not None
        max_drafted = (self.target.length - 1 - self.count).clamp(min=1)  # the last code is a bonus
        lengths = (1 + (draft.survival[:, 1:] >= self.min_survival).sum(1)).minimum(max_drafted)
        depth = int(lengths.max())
        if depth not in self._trees:
            self._trees[depth] = chain_tree(len(lengths), depth, lengths.device)
        tree, nodes = self._trees[depth], depth + 1
        if len(lengths) > 1:
            tree = _masked(tree, lengths, self._arange[:nodes])
        assert draft.probs is not None
        return replace(draft, tree=tree, codes=draft.codes[:, :nodes], probs=draft.probs[:, :nodes])

    def _index(self) -> Tensor:
        """Return the index in the image of the code that each level drafts, [B, depth]."""
        index = self.count[:, None] + self._arange[: self.depth]
        return index.clamp_(max=self.target.length - 1)

    def observe(self, output: TargetOutput) -> None:
        """Keep the decided codes, with the target's features, for the next draft."""
        super().observe(output)
        verdict = output.verdict
        features = self.guidance.merge(output.features)
        if output.draft.tree.chain:  # kept nodes come first, and nothing reads the nodes after them
            self.features[:, : features.shape[1]].copy_(features)
        else:
            path = verdict.path[..., None].expand(-1, -1, features.shape[-1])
            self.features.copy_(features.gather(1, path))
        self.next_embeds.copy_(self.target.embed(verdict.next_codes))
        self.waiting.copy_(verdict.kept)
        self.hints.copy_(rejected_features(output, features[..., : self.hints.shape[-1]]))

    def _drafter_forward(self) -> Tensor:
        """Run the drafter over the waiting inputs and the queries; return the features of every level, [B, depth, D]."""
        capacity = self.next_embeds.shape[1]
        max_waiting = max(int(self.waiting.max()), 1) if on_host(self.waiting) else capacity
        if max_waiting not in self._layouts:
            self._layouts[max_waiting] = layout(capacity, max_waiting, self._arange)
        *tables, scratch = self._layouts[max_waiting]
        position, mask, is_last = (table[self.waiting] for table in tables)
        nodes = self.cache.nodes(position, mask, scratch)
        hints = torch.cat((self.hints[:, :1] * is_last, self.hints[:, 1:]), 1)
        next_embeds, features = self.next_embeds[:, :max_waiting], self.features[:, :max_waiting]
        out = self.drafter(next_embeds, features, nodes, self.cache, hints)
        self.cache.used += self.waiting
        first_level = out[self._row, (self.waiting - 1).clamp(min=0)]
        return torch.cat((first_level[:, None], out[:, max_waiting:]), 1)

    def _probs(self, features: Tensor, index: Tensor) -> Tensor:
        """Return the distributions [B, W, V] of the codes with index [B, 1] in the image, from their features [B, W, D]."""
        logits = self.target.head(features)
        logits = logits if logits.element_size() == 8 else logits.float()
        return self.sampling.probs(self.target.constrain(logits, index))


def unshortened_reason(min_survival: float, tree: TreeBuilder, compiled: bool) -> str | None:
    """Return the reason why chains cannot end early, in a sentence; None where they can."""
    if not is_drawn_chain(tree):
        fault = "is no chain of the library's" if tree.chain else "branches"
        return f"min_survival {min_survival} ends chains early, and the tree {fault}; use a chain such as chain-6, or leave min_survival out"
    if compiled:
        return f"min_survival {min_survival} makes passes of several lengths, and --compile needs passes of one; use one of the two"
    return None


def layout(capacity: int, max_waiting: int, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lay out the inputs in scratch slots [M]: the first `capacity` are for waiting inputs, the following ones for queries.

    Up to `max_waiting` inputs wait: N = M - capacity + max_waiting inputs are run. Return, for each of W = capacity + 1 numbers of
    waiting inputs, the positions of inputs after the decided codes, [W, N], the slots that each input attends to, [W, N, M], and
    whether an input is the last that waits, which has the root's hint, [W, max_waiting, 1]; and the slots of inputs, [1, N], which
    do not depend on `max_waiting`, as sums over slots are rounded in their order.

    With depth 2, capacity = max_waiting = 3 and M = 4: where one input waits, slots 1 and 2 are unused, and the query in slot 3 has
    position 1 and attends to slots 0 and 3; where two wait, the query has position 2 and attends to slots 0, 1 and 3.
    """
    num_waiting = torch.arange(capacity + 1, device=slots.device)[:, None]  # [W, 1]
    is_query = slots >= capacity
    in_use = is_query | (slots < num_waiting)  # [W, M]
    position = torch.where(is_query, num_waiting + slots - capacity, slots)
    mask = (slots[:, None] >= slots) & in_use[:, None] | (slots[:, None] == slots)  # [W, M, M]
    is_last = (slots[:max_waiting] == num_waiting - 1)[..., None]
    slot = torch.cat((slots[:max_waiting], slots[capacity:]))
    return position[:, slot], mask[:, slot], is_last, slot[None]


def _masked(tree: Tree, lengths: Tensor, nodes: Tensor) -> Tree:
    """Return chains of nodes [N] whose nodes after the first 1 + lengths [B] are no children."""
    children = tree.children.where((nodes < lengths[:, None])[..., None], -1)
    return replace(tree, children=children, depth=tree.depth.where(nodes <= lengths[:, None], 0))


def rejected_features(output: TargetOutput, features: Tensor) -> Tensor:
    """Return the guided features [B, N, D] at rejected nodes, as hints for the next draft, [B, depth, D].

    Entry i is the feature of the draft's first node at depth kept + i; 0 where the draft has no node at this depth.
    """
    tree, num_kept = output.draft.tree, output.verdict.kept
    depth = output.verdict.path.shape[1] - 1
    level = num_kept[:, None] + torch.arange(depth, device=num_kept.device)
    if tree.chain:
        node = level.clamp(max=tree.depth.shape[1] - 1)
        exists = tree.depth.gather(1, node) == level
    else:
        at_level = tree.depth[:, None] == level[..., None]  # [B, depth, N]
        node, exists = at_level.byte().argmax(-1), at_level.any(-1)
    return features.gather(1, node[..., None].expand(-1, -1, features.shape[-1])) * exists[..., None]
