"""How well a drafter drafts: pictures of held-out prompts, drawn without loss, and what was kept of every draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lanternpp.accept.exact import Exact
from lanternpp.engine.decode import Engine, generate
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.noise import Noise
from lanternpp.engine.proposer import Proposer
from lanternpp.engine.sampling import Sampling
from lanternpp.targets.base import Target
from lanternpp.types import Draft, Verdict


class Watched(Engine):
    """An engine that counts which children of a draft were judged and which of them were kept."""

    tried: Tensor  # [levels, K] by the depth of their parent and their rank among its children
    kept: Tensor

    def judge(self, draft: Draft, logits: Tensor, noise: Noise) -> Verdict:
        """As any engine's, counted."""
        verdict = super().judge(draft, logits, noise)
        tree, batch = draft.tree, torch.arange(self.batch, device=logits.device)
        if not hasattr(self, "tried"):
            shape = len(tree.widths), tree.children.shape[2]
            self.tried = torch.zeros(shape, dtype=torch.int64, device=logits.device)
            self.kept = torch.zeros_like(self.tried)
        room = self.target.length - self.count
        for level in range(len(tree.widths)):
            here = (verdict.kept > level) & (room > level + 1)  # a picture's end cuts what was kept
            children = tree.children[batch, verdict.path[:, level]]  # [B, K]
            codes = draft.codes.gather(1, children.clamp(min=0))
            again = (codes[:, :, None] == codes[:, None]).tril(-1).any(-1)  # never tried twice
            good = (children == verdict.path[:, level + 1, None]) & (verdict.kept > level + 1)[:, None]
            earlier = good.long().cumsum(1) - good.long()  # a sibling was kept before
            judged = (children >= 0) & ~again & (earlier == 0) & here[:, None]
            self.tried[level] += judged.sum(0)
            self.kept[level] += (judged & good).sum(0)
        return verdict


@dataclass(frozen=True)
class Drawn:
    """Pictures drawn with a drafter, and what was kept of its drafts."""

    codes: Tensor  # [n, length]
    figures: dict[str, Any]


def watch(
    target: Target, proposer: Proposer, sampling: Sampling, guidance: Guidance, prompts: Sequence[str]
) -> Drawn:
    """One picture per prompt, all at once, without loss.

    Figures: codes_per_pass; kept_by_depth, how often the walk went on from a node at depth 0, 1 ...; kept_by_rank,
    how often a first, second ... child was kept once judged; judged, the children judged by depth and rank.
    """
    engine = Watched(target, proposer, Exact(), sampling, guidance, len(prompts))
    harvests = generate(engine, list(prompts), list(range(len(prompts))))
    passes = [count for harvest in harvests for count in harvest.accepted]
    tried, kept = engine.tried.cpu(), engine.kept.cpu()
    figures = {
        "codes_per_pass": sum(passes) / len(passes),
        "kept_by_depth": shares(kept.sum(1), tried[:, 0]),
        "kept_by_rank": shares(kept.sum(0), tried.sum(0)),
        "judged": tried.tolist(),
    }
    return Drawn(torch.stack([harvest.codes for harvest in harvests]), figures)


def shares(part: Tensor, whole: Tensor) -> list[float | None]:
    """Quotients of counts, to four digits; None where nothing was counted."""
    pairs = zip(part.tolist(), whole.tolist(), strict=True)
    return [round(a / b, 4) if b else None for a, b in pairs]
