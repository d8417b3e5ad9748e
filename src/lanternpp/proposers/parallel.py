"""A parallel drafter and a tree builder: one pass of the drafter for a whole draft."""

from __future__ import annotations

import torch
from torch import Tensor

from lanternpp.drafters.base import QueryDrafter
from lanternpp.engine.cache import Cache
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.proposers.network import NetworkProposer
from lanternpp.targets.base import Target
from lanternpp.types import Admission, Draft, Frontier, TargetOutput


class Parallel(NetworkProposer):
    """Before every pass of the target, one of the drafter, over what was decided since and a query per level.

    Its cache has one row per sample and runs one position behind the target's, as EAGLE's does. What was
    decided waits, with the target's guided features there, until the next draft.
    """

    needs = "parallel"
    drafter: QueryDrafter

    def open(self, target: Target, sampling: Sampling, guidance: Guidance, batch: int) -> None:
        """Make room for a batch: the drafter's cache, and what waits to be looked at."""
        super().open(target, sampling, guidance, batch)
        like, depth, dim = next(self.drafter.parameters()), self.depth, self.drafter.decoder.config.dim
        span = 2 * depth  # what waits, one level more than the draft has, and the queries
        self.cache = Cache(self.drafter.decoder.config, batch, target.slots + target.length + span, like)
        self.next_embeds = torch.zeros(batch, depth + 1, dim, dtype=like.dtype, device=like.device)
        self.features = torch.zeros_like(self.next_embeds)
        self.hints = torch.zeros_like(self.next_embeds[:, 1:])  # [B, depth, D] of the features of every level
        self.waiting = torch.zeros_like(self.root)
        every = torch.arange(target.vocab, device=like.device)
        self.prev_code_table = self.drafter.prev_code(target.embed(every).to(like.dtype))  # [V, H]
        self._row = torch.arange(batch, device=like.device)
        self._line = torch.arange(span, device=like.device)

    def begin(self, new: Admission) -> None:
        """Prefill with the prompt's guided features, each beside the conditional input one position ahead."""
        super().begin(new)
        like = self.ahead
        features = self.guidance.merge(new.features).to(like.dtype)
        root = self.target.embed(new.root[:, None]).to(like.dtype)
        next_embeds = torch.cat(
            (self.drafter.prompt_inputs(new.prompt.embeds[:1, 1:].to(like.dtype)), root), 1
        )
        slot = self._row[new.slot : new.slot + 1]
        prompt_cache = self.cache.rows(slot, new.prompt.start[:1], features.shape[1])
        self.drafter(next_embeds, features, prompt_cache.nodes(), prompt_cache)
        self.cache.used[slot] -= 1  # the last waits, so that the queries can follow it
        self.next_embeds[slot, 0], self.features[slot, 0] = next_embeds[:, -1], features[:, -1]
        self.hints[slot] = 0
        self.waiting[slot] = 1

    def propose(self, noise: Noise) -> Draft:
        """One pass of the drafter, then a tree whose nodes cost a product each."""
        levels = self._drafter_forward()  # [B, depth, D]
        query = self.drafter.level_query(levels)
        index = self.count[:, None] + self._line[: self.depth]
        index.clamp_(max=self.target.length - 1)  # [B, depth] the code of the image that each level guesses

        def extend(at: Frontier) -> Tensor:
            here, prev_code = slice(at.level, at.level + 1), self.prev_code_table[at.codes]
            turned = self.drafter.combine(levels[:, here], query[:, here], prev_code)
            return self._probs(turned, index[:, here])

        q = self._probs(levels[:, :1], index[:, :1])[:, 0]
        return self.grow(q, extend, noise)

    def observe(self, output: TargetOutput) -> None:
        """Keep what was decided, with the target's own features, for the next draft."""
        super().observe(output)
        verdict = output.verdict
        features = self.guidance.merge(output.features)
        path = verdict.path[..., None].expand(-1, -1, features.shape[-1])
        self.features.copy_(features.gather(1, path))
        self.next_embeds.copy_(self.target.embed(verdict.next_codes))
        self.waiting.copy_(verdict.kept)
        self.hints.copy_(refused(output, features))

    def _drafter_forward(self) -> Tensor:
        """The drafter's pass over what waits and the queries -> features of every level, [B, depth, D]."""
        known, line, waiting = self.next_embeds.shape[1], self._line, self.waiting[:, None]
        query = line >= known
        there = query | (line < waiting)  # [B, N]
        place = torch.where(query, waiting + line - known, line)  # behind what is decided
        mask = (line[:, None] >= line) & there[:, None] | (line[:, None] == line)
        nodes = self.cache.nodes(place, mask)
        last = (line[:known] == waiting - 1)[..., None]  # the hint of the first level belongs to the root
        hints = torch.cat((self.hints[:, :1] * last, self.hints[:, 1:]), 1)
        out = self.drafter(self.next_embeds, self.features, nodes, self.cache, hints)
        self.cache.used += self.waiting
        first = out[self._row, (self.waiting - 1).clamp(min=0)]
        return torch.cat((first[:, None], out[:, known:]), 1)

    def _probs(self, features: Tensor, index: Tensor) -> Tensor:
        """Features [B, W, D] of codes index [B, 1] of the image -> what those are drawn from, [B, W, V]."""
        logits = self.target.head(features)
        logits = logits if logits.element_size() == 8 else logits.float()
        return self.sampling.probs(self.target.constrain(logits, index))


def refused(output: TargetOutput, features: Tensor) -> Tensor:
    """What a pass showed of the places behind what it decided, [B, depth, D]; guided features [B, N, D].

    At every depth it is the feature of the draft's first node there; 0 where the draft ended before.
    """
    tree, kept = output.draft.tree, output.verdict.kept
    depth = output.verdict.path.shape[1] - 1
    level = torch.arange(depth, device=kept.device)
    at = tree.depth[:, None] == (kept[:, None] + level)[..., None]  # [B, depth, N]
    first = at.byte().argmax(-1)[..., None].expand(-1, -1, features.shape[-1])
    return features.gather(1, first) * at.any(-1, keepdim=True)
