"""Token-wise verification: walk a draft from its root; at each node try the children in order until one is accepted.

Written once for every rule, tree and proposer (SpecInfer, arXiv 2305.09781; without replacement, Sequoia 2402.12374). With
a rule whose `relax` is the identity the output follows the target's distribution.

The cost of a relaxed rule can be measured. Let r be the distribution that the next child is verified against. Trying one
child drawn from q yields a code that follows the rule's output distribution, and the total variation between that and r is
computed exactly. At a node with one child this is the node's cost. With several children the costs of those tried are
summed; by the triangle inequality the mean of the sum bounds the node's total variation from above, and the mean over
pictures of the sum over nodes bounds that between the distributions of pictures. In greedy decoding the cost is 1 for
each code that is not the most probable.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lanternpp.accept.base import Acceptance, tv_cost
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.types import Draft, Verdict, on_host


def verify_tokenwise(
    draft: Draft,
    logits: Tensor,
    sampling: Sampling,
    rule: Acceptance,
    noise: Noise,
    measure_tv: bool = False,
) -> Verdict:
    """A draft of N nodes and the target's logits [B, N, V] at them -> the accepted path and its bonus.

    measure_tv: also the total variation cost of each node of the path. Loop lengths are constants of the tree, so that
    the step can be compiled; on a CPU loops end early once every sample is decided.
    """
    tree, widths = draft.tree, draft.tree.widths
    batch = torch.arange(len(logits), device=logits.device)
    early_exit = on_host(logits)
    node = torch.zeros_like(batch)
    alive = torch.ones_like(batch, dtype=torch.bool)
    kept, path = torch.ones_like(batch), [node]
    # p at the current node, less what rejected children took
    residual = sampling.probs(logits[batch, node])
    u = noise.fine(Noise.ACCEPT, len(widths), max(widths, default=0))
    cost = [torch.zeros_like(residual[:, 0]) for _ in range(len(widths) + 1)]
    for level, width in enumerate(widths):
        here = rule.at(level)
        reads_q = type(here).relax_with_draft is not Acceptance.relax_with_draft
        q = None if draft.probs is None else draft.probs[batch, node]
        accepted, next_node = torch.zeros_like(alive), node
        for rank in range(width):
            undecided = alive & ~accepted
            if early_exit and not undecided.any():
                break
            child = tree.children[batch, node, rank]
            code = draft.codes[batch, child.clamp(min=0)]
            drawn = q if q is not None else torch.zeros_like(residual).scatter_(1, code[:, None], 1)
            chance = drawn.gather(1, code[:, None])[:, 0]
            tried = undecided & (child >= 0) & (chance > 0)
            if early_exit and not tried.any():
                continue
            # A code that the format forbids is never relaxed, and has no part in what follows from q.
            permitted = logits[batch, node, code] > float("-inf")
            if measure_tv or reads_q:
                drawn = drawn.where(logits[batch, node] > float("-inf"), 0)
            relaxed = here.relax_with_draft(residual, drawn, code).where(permitted[:, None], residual)
            taken = tried & sampling.accepts(relaxed, chance, code, u[:, level, rank])
            if measure_tv:
                cost[level] += tried * _cost(sampling, here, residual, drawn, code, taken)
            rejected = tried & ~taken
            accepted, next_node = accepted | taken, torch.where(taken, child, next_node)
            if early_exit and not rejected.any():
                continue
            residual = residual.where(
                ~rejected[:, None], sampling.residual(here, residual, relaxed, drawn, code)
            )
            if q is not None:
                q = q.where(~rejected[:, None], without(q, code))
        alive, node = accepted, next_node
        if early_exit and not alive.any():
            break
        residual = residual.where(~alive[:, None], sampling.probs(logits[batch, node]))
        kept = kept + alive
        path.append(node)
    path += [node] * (len(widths) + 1 - len(path))
    bonus = sampling.draw(residual, noise)
    return verdict_of(draft, torch.stack(path, 1), kept, bonus, torch.stack(cost, 1) if measure_tv else None)


def without(q: Tensor, code: Tensor) -> Tensor:
    """q [B, V] without `code` [B], renormalised."""
    q = q.scatter(1, code[:, None], 0)
    return q / q.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)


def _cost(sampling: Sampling, rule: Acceptance, p: Tensor, q: Tensor, code: Tensor, taken: Tensor) -> Tensor:
    """The total variation from p [B, V] that trying one child cost, [B]."""
    if sampling.greedy:
        return (taken & (code != p.argmax(-1))).to(p.dtype)
    return tv_cost(rule, p, q).to(p.dtype)


def padded(verdict: Verdict, length: int) -> Verdict:
    """A verdict on a shorter draft with paths of the usual length, [B, length]."""
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
    distribution: Tensor | None = None,
) -> Verdict:
    """The verdict that keeps the first `kept` [B] nodes of path [B, P], with `bonus` [B] (of latents [B, C]) after them."""
    batch = torch.arange(len(path), device=path.device)[:, None]
    last = torch.arange(path.shape[1], device=path.device) == kept[:, None] - 1
    last = last.view(*last.shape, *(1 for _ in bonus.shape[1:]))
    following = torch.where(last, bonus[:, None], draft.codes[batch, path.roll(-1, 1)])
    return Verdict(path, kept, following, bonus, cost, distribution)
