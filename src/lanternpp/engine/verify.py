"""Verification: walk a draft from the root; at each node its children are tried in order until one is accepted.

Written once for every rule, tree and proposer (SpecInfer, arXiv 2305.09781; without replacement,
Sequoia 2402.12374). With a rule whose `relax` is the identity, the output follows the target's law.

The cost of a relaxed rule can be measured. Let r be the distribution that the next child is verified against. Trying one
child drawn from q yields a code that follows the rule's output law, and the total variation between that and r is
computed exactly. At a node with one child this is the node's cost. With several children the costs of those tried are
summed; by the triangle inequality the mean of the sum bounds the node's total variation from above, and the mean over
pictures of the sum over nodes bounds that between the distributions of pictures. In greedy decoding the cost is 1 for
each code that is not the most probable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.accept.variation import tv_cost
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.types import Draft, Verdict, on_host


def verify(
    draft: Draft,
    logits: Tensor,
    sampling: Sampling,
    rule: Acceptance,
    noise: Noise,
    measure_tv: bool = False,
) -> Verdict:
    """A draft of N nodes and the target's logits [B, N, V] at them -> the path that is kept and its bonus.

    measure_tv: also the total variation cost of each node of the path. Loop lengths are constants of the tree, so that the
    step can be compiled; on a CPU loops end early once every sample is decided.
    """
    tree, widths = draft.tree, draft.tree.widths
    if tree.chain and not measure_tv:
        return _verify_chain(draft, logits, sampling, rule, noise)
    batch = torch.arange(len(logits), device=logits.device)
    early_exit = on_host(logits)
    node = torch.zeros_like(batch)
    alive = torch.ones_like(batch, dtype=torch.bool)
    kept, path = torch.ones_like(batch), [node]
    left = sampling.probs(logits[batch, node])  # r: p at the current node, less what refused children took
    u = noise.fine(Noise.ACCEPT, len(widths), max(widths, default=0))
    cost = [torch.zeros_like(left[:, 0]) for _ in range(len(widths) + 1)]
    for level, width in enumerate(widths):
        here = rule.at(level)
        q = None if draft.probs is None else draft.probs[batch, node]
        down, below = torch.zeros_like(alive), node
        for rank in range(width):
            undecided = alive & ~down
            if early_exit and not undecided.any():
                break
            child = tree.children[batch, node, rank]
            code = draft.codes[batch, child.clamp(min=0)]
            drawn = q if q is not None else torch.zeros_like(left).scatter_(1, code[:, None], 1)
            chance = drawn.gather(1, code[:, None])[:, 0]
            tried = undecided & (child >= 0) & (chance > 0)
            if early_exit and not tried.any():
                continue
            permitted = logits[batch, node, code] > float("-inf")  # what the format forbids is never relaxed
            relaxed = here.relax_with_draft(left, drawn, code).where(permitted[:, None], left)
            good = tried & sampling.accepts(relaxed, chance, code, u[:, level, rank])
            if measure_tv:
                cost[level] += tried * _cost(sampling, here, left, drawn, code, good)
            refused = tried & ~good
            down, below = down | good, torch.where(good, child, below)
            if early_exit and not refused.any():
                continue
            left = left.where(~refused[:, None], sampling.residual(here, left, relaxed, drawn, code))
            if q is not None:
                q = q.where(~refused[:, None], without(q, code))
        alive, node = down, below
        if early_exit and not alive.any():
            break
        left = left.where(~alive[:, None], sampling.probs(logits[batch, node]))
        kept = kept + alive
        path.append(node)
    path += [node] * (len(widths) + 1 - len(path))
    bonus = sampling.draw(left, noise)
    return verdict_of(draft, torch.stack(path, 1), kept, bonus, torch.stack(cost, 1) if measure_tv else None)


def _verify_chain(
    draft: Draft, logits: Tensor, sampling: Sampling, rule: Acceptance, noise: Noise
) -> Verdict:
    """`verify` where no node has more than one child: all levels are verified at once, each as if those before it were kept."""
    codes, depth = draft.codes[:, 1:], draft.codes.shape[1] - 1
    batch = torch.arange(len(codes), device=codes.device)
    p = sampling.probs(logits)
    if not depth:
        nothing = torch.zeros_like(draft.codes)
        return verdict_of(draft, nothing, nothing[:, 0] + 1, sampling.draw(p[:, 0], noise))
    here, code = p[:, :-1].flatten(0, 1), codes.flatten()
    pick = codes[..., None]
    q = torch.zeros_like(p[:, :-1]).scatter_(-1, pick, 1) if draft.probs is None else draft.probs[:, :-1]
    chance = q.gather(-1, pick).flatten()
    tried = (draft.tree.children[:, :-1, 0] >= 0).flatten() & (chance > 0)
    rules = [rule.at(level) for level in range(depth)]
    same = all(other is rules[0] for other in rules)
    relaxed = rules[0].relax_with_draft(here, q.flatten(0, 1), code) if same else _each(rules, p, q, codes)
    if relaxed is not here:
        permitted = logits[:, :-1].gather(-1, pick).flatten() > float("-inf")
        relaxed = relaxed.where(permitted[:, None], here)
    u = noise.fine(Noise.ACCEPT, depth, 1).flatten()
    good = tried & sampling.accepts(relaxed, chance, code, u)
    last = good.view_as(codes).cumprod(1).sum(1)  # [B] the node at which the walk ends
    left, at = p[batch, last], last.clamp(max=depth - 1)
    row = batch * depth + at
    early_exit, rest = on_host(logits), left
    for level, each in enumerate(rules[:1] if same else rules):
        mine = batch >= 0 if same else at == level
        if early_exit and not mine.any():
            continue
        found = sampling.residual(each, here[row], relaxed[row], q[batch, at], code[row])
        rest = found.where(mine[:, None], rest)
    refused = tried[row] & (last < depth)
    left = left.where(~refused[:, None], rest)
    path = torch.arange(depth + 1, device=codes.device).minimum(last[:, None])
    return verdict_of(draft, path, last + 1, sampling.draw(left, noise))


def _each(rules: Sequence[Acceptance], p: Tensor, q: Tensor, codes: Tensor) -> Tensor:
    """p [B, N, V] relaxed for codes [B, N - 1], each level by its own rule -> [B * (N - 1), V]."""
    relaxed = [
        rule.relax_with_draft(p[:, level], q[:, level], codes[:, level]) for level, rule in enumerate(rules)
    ]
    return torch.stack(relaxed, 1).flatten(0, 1)


def without(q: Tensor, code: Tensor) -> Tensor:
    """q [B, V] without `code` [B], renormalised."""
    q = q.scatter(1, code[:, None], 0)
    return q / q.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)


def _cost(sampling: Sampling, rule: Acceptance, p: Tensor, q: Tensor, code: Tensor, good: Tensor) -> Tensor:
    """The total variation from p [B, V] that trying one child cost, [B]."""
    if sampling.greedy:
        return (good & (code != p.argmax(-1))).to(p.dtype)
    return tv_cost(rule, p, q).to(p.dtype)


def padded(verdict: Verdict, length: int) -> Verdict:
    """The verdict on a draft that was shorter than others may be, with paths [B, length]."""
    more = length - verdict.path.shape[1]
    if not more:
        return verdict

    def longer(x: Tensor) -> Tensor:
        return torch.cat((x, x[:, -1:].expand(-1, more)), 1)

    cost = None if verdict.tv_cost is None else longer(verdict.tv_cost)
    path, following = longer(verdict.path), longer(verdict.next_codes)
    return replace(verdict, path=path, next_codes=following, tv_cost=cost)


def verdict_of(
    draft: Draft,
    path: Tensor,
    kept: Tensor,
    bonus: Tensor,
    cost: Tensor | None = None,
    law: Tensor | None = None,
) -> Verdict:
    """The verdict that keeps the first `kept` [B] nodes of path [B, P] and draws `bonus` [B] behind them."""
    following = draft.codes.gather(1, path.roll(-1, 1))
    last = torch.arange(path.shape[1], device=path.device) == kept[:, None] - 1
    return Verdict(path, kept, torch.where(last, bonus[:, None], following), bonus, cost, law)
