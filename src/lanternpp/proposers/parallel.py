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
from lanternpp.nn.backend import DrafterKernels
from lanternpp.proposers.network import NetworkProposer
from lanternpp.trees.base import TreeBuilder
from lanternpp.trees.chain import chain_tree, is_drawn_chain
from lanternpp.types import Admission, Draft, Frontier, TargetOutput, Tree, on_host


class Parallel(NetworkProposer):
    """One drafter pass per draft, over the codes decided since the last draft and one query per level.

    Its cache has one row per sample and holds one position less than the target's, as EAGLE's does. The codes of the last
    verdict are kept as `next_embeds`, with the target's guided features, until the next draft; `waiting` counts them.

    min_survival: a chain ends before the first code that, with all before it, is kept with less than this probability, as
    the drafter predicts it; it has one code at least. The prediction for a code reads the codes before it and nothing that
    was drawn later. So the end of a chain is a stopping time, and the code drawn after the end is the target's, as after
    any chain of that length: the distribution of the pictures is the same. The chains of a batch are as long as the
    longest, and nodes after the end of another are no children. 0: chains have all codes, and nothing is predicted.
    """

    needs = "parallel"
    dials = frozenset({"tree", "verify", "min_survival"})
    drafter: ParallelDrafter
    min_survival: float = 0.0

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """As in the base class; InputError where the drafter does not predict what `min_survival` needs."""
        made = super().build(parts)
        if parts.min_survival:
            if not isinstance(made, Parallel) or made.drafter.confidence is None:
                raise InputError(
                    f"min_survival {parts.min_survival} needs a parallel drafter that predicts which codes are kept, and this one does "
                    "not; train it again with `lanternpp train --kind parallel`, or leave min_survival out"
                )
            made.min_survival = parts.min_survival
        return made

    @property
    def aux_layers(self) -> tuple[int, ...]:  # type: ignore[override]
        """Those of its drafter."""
        return self.drafter.aux_layers

    def open(self, target: Target, sampling: Sampling, guidance: Guidance, batch: int) -> None:
        """Allocate the drafter's cache and the inputs that the next draft starts with."""
        super().open(target, sampling, guidance, batch)
        like, depth, dim = next(self.drafter.parameters()), self.depth, self.drafter.decoder.config.dim
        span = 2 * depth  # waiting inputs, at most depth + 1, and depth - 1 queries
        self.cache = Cache(self.drafter.decoder.config, batch, target.slots + target.length + span, like)
        self.next_embeds = torch.zeros(batch, depth + 1, dim, dtype=like.dtype, device=like.device)
        self.features = self.next_embeds.repeat(1, 1, 1 + len(self.aux_layers))
        self.hints = torch.zeros_like(self.next_embeds[:, 1:])  # [B, depth, D] of the features of every level
        self.waiting = torch.zeros_like(self.root)
        every = torch.arange(target.vocab, device=like.device)
        # [V, H], what `combine` reads of every code
        self.prev_code_table = self.drafter.before(target.embed(every).to(like.dtype))
        self._whole_chain = is_drawn_chain(self.builder)
        self.whole_steps = type(self) is Parallel and self._whole_chain and not self.min_survival
        if self._whole_chain:
            dtype = like.dtype if like.element_size() == 8 else torch.float32
            self.probs_of_nodes = torch.zeros(batch, depth + 1, target.vocab, dtype=dtype, device=like.device)
            self._trees = {depth: chain_tree(batch, depth, like.device)}  # by their depth
        self._row = torch.arange(batch, device=like.device)
        self._line = torch.arange(span, device=like.device)
        self._layouts = {depth + 1: layout(depth + 1, depth + 1, self._line)}  # by how many inputs may wait

    def begin(self, new: Admission) -> None:
        """Prefill with the prompt's guided features, each paired with the conditional input at the next position."""
        super().begin(new)
        like = self.next_embeds
        features = self.guidance.merge(new.features).to(like.dtype)
        root = self.target.embed(new.root[:, None]).to(like.dtype)
        next_embeds = torch.cat(
            (self.drafter.prompt_inputs(new.prompt.embeds[:1, 1:].to(like.dtype)), root), 1
        )
        slot = self._row[new.slot : new.slot + 1]
        prompt_cache = self.cache.rows(slot, new.prompt.start[:1], features.shape[1])
        prompt_cache.prefill(self.drafter, next_embeds, features)
        self.cache.used[slot] -= 1  # the last input is run again with the queries after it
        self.next_embeds[slot, 0], self.features[slot, 0] = next_embeds[:, -1], features[:, -1]
        self.hints[slot] = 0
        self.waiting[slot] = 1

    def propose(self, noise: Noise) -> Draft:
        """One pass of the drafter, then a tree whose nodes cost one product with the head each."""
        levels = self._drafter_forward()  # [B, depth, D]
        query = self.drafter.down(levels)
        native = self.drafter.native if self._whole_chain and on_host(levels) else None
        if native is not None and (chain := self._sampled(native, levels, query, noise)) is not None:
            return chain
        index = self._index()
        if self.min_survival:
            return self._chain(levels, query, index, noise)

        def extend(at: Frontier) -> Tensor:
            here, prev_code = slice(at.level, at.level + 1), self.prev_code_table[at.codes]
            conditioned = self.drafter.combine(levels[:, here], query[:, here], prev_code)
            return self._probs(conditioned, index[:, here])

        q = self._probs(levels[:, :1], index[:, :1])[:, 0]
        return self.grow(q, extend, noise)

    def _sampled(self, native: DrafterKernels, levels: Tensor, query: Tensor, noise: Noise) -> Draft | None:
        """A chain sampled in one call, from levels [B, depth, D] and query [B, depth, H]; None where `native` does not do it."""
        draft = self._empty()
        bias = None
        if type(self.target).constrain is not Target.constrain:
            bias = torch.zeros_like(self.probs_of_nodes[:, 1:])
            bias = self.target.constrain(bias, self._index())
        u = noise.draft_uniform(self.depth)
        tensors = {"features": levels, "query": query, "prev": self.prev_code_table, "bias": bias, "u": u}
        done = native.sample(draft, self.sampling.warp, self.min_survival, **tensors)
        return self._ended(draft) if done else None

    def _chain(self, levels: Tensor, query: Tensor, index: Tensor, noise: Noise) -> Draft:
        """A chain that ends as `min_survival` says, from levels [B, depth, D], query [B, depth, H] and index [B, depth]."""
        draft = self._empty()
        assert draft.probs is not None and draft.survival is not None and self.drafter.confidence is not None
        for level in range(self.depth):
            here = levels[:, level]
            if level:
                prev_code = self.prev_code_table[draft.codes[:, level]]
                here = self.drafter.combine(here, query[:, level], prev_code)
            before = draft.survival[:, level - 1] if level else 1
            kept = self.drafter.confidence(here)[:, 0].to(draft.survival.dtype).sigmoid() * before
            if level and here.device.type == "cpu" and not (kept >= self.min_survival).any():
                break
            draft.survival[:, level] = kept
            q = self._probs(here[:, None], index[:, level, None])
            draft.probs[:, level] = q[:, 0]
            draft.codes[:, level + 1] = self.sampling.children(q, 1, noise, Noise.DRAFT + level)[:, 0, 0]
        return self._ended(draft)

    def _empty(self) -> Draft:
        """A chain of all levels without its codes."""
        survival = self.probs_of_nodes.new_zeros(len(self.root), self.depth) if self.min_survival else None
        codes = self.root[:, None].expand(-1, self.size).contiguous()
        return Draft(self._trees[self.depth], codes, self.probs_of_nodes, survival)

    def _ended(self, draft: Draft) -> Draft:
        """A chain without the nodes after its end; chains of a batch, as long as the longest."""
        if draft.survival is None:
            return draft
        room = (self.target.length - 1 - self.count).clamp(min=1)  # codes that the picture has room for
        lengths = (1 + (draft.survival[:, 1:] >= self.min_survival).sum(1)).minimum(room)
        longest = int(lengths.max())
        if longest not in self._trees:
            self._trees[longest] = chain_tree(len(lengths), longest, lengths.device)
        tree, nodes = self._trees[longest], longest + 1
        if len(lengths) > 1:
            tree = _masked(tree, lengths, self._line[:nodes])
        assert draft.probs is not None
        return replace(draft, tree=tree, codes=draft.codes[:, :nodes], probs=draft.probs[:, :nodes])

    def _index(self) -> Tensor:
        """The code of the image that each level drafts, [B, depth]."""
        index = self.count[:, None] + self._line[: self.depth]
        return index.clamp_(max=self.target.length - 1)

    def observe(self, output: TargetOutput) -> None:
        """Keep the decided codes, with the target's features, for the next draft."""
        super().observe(output)
        verdict = output.verdict
        features = self.guidance.merge(output.features)
        if output.draft.tree.chain:  # nothing reads the nodes after the kept ones
            self.features[:, : features.shape[1]].copy_(features)
        else:
            path = verdict.path[..., None].expand(-1, -1, features.shape[-1])
            self.features.copy_(features.gather(1, path))
        self.next_embeds.copy_(self.target.embed(verdict.next_codes))
        self.waiting.copy_(verdict.kept)
        self.hints.copy_(rejected_features(output, features[..., : self.hints.shape[-1]]))

    def _drafter_forward(self) -> Tensor:
        """The drafter's pass over the waiting inputs and the queries -> features of every level, [B, depth, D]."""
        known = self.next_embeds.shape[1]
        most = max(int(self.waiting.max()), 1) if on_host(self.waiting) else known
        if most not in self._layouts:
            self._layouts[most] = layout(known, most, self._line)
        *by_waiting, scratch = self._layouts[most]
        place, mask, last = (each[self.waiting] for each in by_waiting)
        nodes = self.cache.nodes(place, mask, scratch)
        hints = torch.cat((self.hints[:, :1] * last, self.hints[:, 1:]), 1)
        out = self.drafter(self.next_embeds[:, :most], self.features[:, :most], nodes, self.cache, hints)
        self.cache.used += self.waiting
        first = out[self._row, (self.waiting - 1).clamp(min=0)]
        return torch.cat((first[:, None], out[:, most:]), 1)

    def _probs(self, features: Tensor, index: Tensor) -> Tensor:
        """Features [B, W, D] of codes index [B, 1] of the image -> their distributions, [B, W, V]."""
        logits = self.target.head(features)
        logits = logits if logits.element_size() == 8 else logits.float()
        return self.sampling.probs(self.target.constrain(logits, index))


def why_not_shortened(min_survival: float, tree: TreeBuilder, compiled: bool) -> str | None:
    """Why chains cannot end early, in a sentence; None where they can."""
    if not is_drawn_chain(tree):
        what = "is no chain of the library's" if tree.chain else "branches"
        return f"min_survival {min_survival} ends chains early, and the tree {what}; use a chain such as chain-6, or leave min_survival out"
    if compiled:
        return f"min_survival {min_survival} makes passes of several lengths, and --compile needs passes of one; use one of the two"
    return None


def layout(known: int, most: int, line: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The drafter's inputs when up to `most` wait, of which there may be `known`; the others of line [M] are queries.

    N = M - known + most, W = known + 1. By how many wait: their places after the decided codes, [W, N]; the scratch slots that
    each attends to, [W, N, M]; and the last that waits, whose hint is that of the root, [W, most, 1]. And their own scratch slots,
    [1, N], which do not depend on `most`, as sums over slots are rounded in their order.

    With depth 2, known = most = 3 and M = 4: where one input waits, slots 1 and 2 are unused, and the query in slot 3 has place 1
    and attends to slots 0 and 3; where two wait, it has place 2 and attends to slots 0, 1 and 3.
    """
    waiting = torch.arange(known + 1, device=line.device)[:, None]
    query = line >= known
    there = query | (line < waiting)
    place = torch.where(query, waiting + line - known, line)
    mask = (line[:, None] >= line) & there[:, None] | (line[:, None] == line)
    own = torch.cat((line[:most], line[known:]))
    return place[:, own], mask[:, own], (line[:most] == waiting - 1)[..., None], own[None]


def _masked(tree: Tree, lengths: Tensor, line: Tensor) -> Tree:
    """Chains of N nodes, each without its nodes after the first 1 + lengths [B]: they are no children; line [N] counts nodes."""
    children = tree.children.where((line < lengths[:, None])[..., None], -1)
    return replace(tree, children=children, depth=tree.depth.where(line <= lengths[:, None], 0))


def rejected_features(output: TargetOutput, features: Tensor) -> Tensor:
    """The target's features at rejected nodes, as hints for the next draft, [B, depth, D]; guided features [B, N, D].

    Entry i is the feature of the draft's first node at depth kept + i; 0 where the draft has none that deep.
    """
    tree, kept = output.draft.tree, output.verdict.kept
    depth = output.verdict.path.shape[1] - 1
    level = kept[:, None] + torch.arange(depth, device=kept.device)
    if tree.chain:
        first = level.clamp(max=tree.depth.shape[1] - 1)
        there = tree.depth.gather(1, first) == level
    else:
        at = tree.depth[:, None] == level[..., None]  # [B, depth, N]
        first, there = at.byte().argmax(-1), at.any(-1)
    return features.gather(1, first[..., None].expand(-1, -1, features.shape[-1])) * there[..., None]
