"""Verification: walk a draft from the root, judging only the children of the node stood on.

Written once for every rule, tree and proposer (SpecInfer, arXiv 2305.09781; without replacement,
Sequoia 2402.12374). With a rule whose `relax` is the identity, the output follows the target's law.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.types import Draft, Verdict


def verify(draft: Draft, logits: Tensor, sampling: Sampling, rule: Acceptance, noise: Noise) -> Verdict:
    """A draft of N nodes and the target's logits [B, N, V] at them -> the path that is kept and its bonus.

    Trip counts are constants of the tree; on a CPU a loop is left once nothing more can change.
    """
    tree, widths = draft.tree, draft.tree.widths
    batch = torch.arange(len(logits), device=logits.device)
    hasty = logits.device.type == "cpu"
    node = torch.zeros_like(batch)
    alive = torch.ones_like(batch, dtype=torch.bool)
    kept, path = torch.ones_like(batch), [node]
    left = sampling.probs(logits[batch, node])  # r, what is left of p at the node stood on
    u = noise.uniform(Noise.ACCEPT, len(widths), max(widths, default=0))
    for level, width in enumerate(widths):
        q = None if draft.probs is None else draft.probs[batch, node]
        down, below = torch.zeros_like(alive), node
        for rank in range(width):
            child = tree.children[batch, node, rank]
            code = draft.codes[batch, child.clamp(min=0)]
            drawn = q if q is not None else torch.zeros_like(left).scatter_(1, code[:, None], 1)
            chance = drawn.gather(1, code[:, None])[:, 0]
            tried = alive & ~down & (child >= 0) & (chance > 0)
            if hasty and not tried.any():
                break
            relaxed = rule.relax(left, code)
            good = tried & sampling.accepts(relaxed, chance, code, u[:, level, rank])
            refused = tried & ~good
            down, below = down | good, torch.where(good, child, below)
            if hasty and not refused.any():
                break
            left = left.where(~refused[:, None], sampling.residual(rule, left, relaxed, drawn, code))
            if q is not None:
                q = q.where(~refused[:, None], without(q, code))
        alive, node = down, below
        if hasty and not alive.any():
            break
        left = left.where(~alive[:, None], sampling.probs(logits[batch, node]))
        kept = kept + alive
        path.append(node)
    path += [node] * (len(widths) + 1 - len(path))
    bonus = sampling.draw(left, noise)
    return _verdict(draft, torch.stack(path, 1), kept, bonus)


def without(q: Tensor, code: Tensor) -> Tensor:
    """q [B, V] without `code` [B], renormalised."""
    q = q.scatter(1, code[:, None], 0)
    return q / q.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)


def _verdict(draft: Draft, path: Tensor, kept: Tensor, bonus: Tensor) -> Verdict:
    following = draft.codes.gather(1, path.roll(-1, 1))
    last = torch.arange(path.shape[1], device=path.device) == kept[:, None] - 1
    return Verdict(path, kept, torch.where(last, bonus[:, None], following), bonus)
