"""Token-wise verification: walk a draft from its root; at each node try the children in order until one is accepted.

Written once for every rule, tree and proposer (SpecInfer, arXiv 2305.09781; without replacement, Sequoia 2402.12374). With
a rule whose `relax` is the identity the output follows the target's distribution.

The cost of a relaxed rule can be measured. Let r be the distribution that the next child is verified against. Trying one
child drawn from q yields a code that follows the rule's output distribution, and the total variation between this
distribution and r is computed exactly. At a node with one child this is the node's cost. With several children the costs of
the tried children are summed; by the triangle inequality the mean of the sum bounds the node's total variation from above,
and the mean over pictures of the sum over nodes bounds the total variation between the distributions of pictures. In greedy
decoding the cost is 1 for each code that is not the most probable.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lanternpp.accept.base import Acceptance, tv_cost
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.nn.backend import PYTORCH
from lanternpp.types import Draft, Verdict, on_host


def verify_tokenwise(
    draft: Draft,
    logits: Tensor,
    sampling: Sampling,
    rule: Acceptance,
    noise: Noise,
    measure_tv: bool = False,
) -> Verdict:
    """Verify a draft of N nodes by the target's logits [B, N, V] at the nodes: the accepted path and its bonus.

    measure_tv: also return the total variation cost of each node of the path. Loop lengths are constants of the tree, so
    that the step can be compiled; on a CPU loops end early once every sample is decided.
    """
    if not measure_tv and (verdict := native_verdict(draft, logits, sampling, rule, noise, joint=False)):
        return verdict
    tree, widths = draft.tree, draft.tree.widths
    batch = torch.arange(len(logits), device=logits.device)
    early_exit = on_host(logits)
    node = torch.zeros_like(batch)  # [B] the last kept node
    alive = torch.ones_like(batch, dtype=torch.bool)  # [B] no level has rejected all children yet
    num_kept, path = torch.ones_like(batch), [node]
    # p at the current node, then the residual of each rejected child, [B, V]
    residual = sampling.probs(logits[batch, node])
    u = noise.fine(Noise.ACCEPT, len(widths), max(widths, default=0))
    cost = [torch.zeros_like(residual[:, 0]) for _ in range(len(widths) + 1)]
    for level, width in enumerate(widths):
        level_rule = rule.at(level)
        reads_q = type(level_rule).relax_with_draft is not Acceptance.relax_with_draft
        # q [B, V] without the rejected children, which were drawn without replacement
        remaining_q = None if draft.probs is None else draft.probs[batch, node]
        accepted, next_node = torch.zeros_like(alive), node
        for rank in range(width):
            undecided = alive & ~accepted
            if early_exit and not undecided.any():
                break
            child = tree.children[batch, node, rank]  # [B], -1 where there is none
            code = draft.codes[batch, child.clamp(min=0)]  # [B]
            q = remaining_q
            if q is None:  # a point mass
                q = torch.zeros_like(residual).scatter_(1, code[:, None], 1)
            q_code = q.gather(1, code[:, None])[:, 0]
            tried = undecided & (child >= 0) & (q_code > 0)
            if early_exit and not tried.any():
                continue
            # A code that the format forbids is never relaxed, and rules and costs read a q without such codes.
            permitted = logits[batch, node, code] > float("-inf")
            if measure_tv or reads_q:
                q = q.where(logits[batch, node] > float("-inf"), 0)
            relaxed = level_rule.relax_with_draft(residual, q, code).where(permitted[:, None], residual)
            accepts = tried & sampling.accepts(relaxed, q_code, code, u[:, level, rank])
            if measure_tv and sampling.greedy:
                cost[level] += tried * (accepts & (code != residual.argmax(-1))).to(residual.dtype)
            elif measure_tv:
                cost[level] += tried * tv_cost(level_rule, residual, q).to(residual.dtype)
            rejects = tried & ~accepts
            accepted = accepted | accepts
            next_node = torch.where(accepts, child, next_node)
            if early_exit and not rejects.any():
                continue
            if not sampling.greedy:  # a greedy choice is between the codes of p still
                next_residual = level_rule.residual(residual, relaxed, q, code)
                residual = residual.where(~rejects[:, None], next_residual)
            if remaining_q is not None:
                remaining_q = remaining_q.where(~rejects[:, None], without(remaining_q, code))
        alive, node = accepted, next_node
        if early_exit and not alive.any():
            break
        residual = residual.where(~alive[:, None], sampling.probs(logits[batch, node]))
        num_kept = num_kept + alive
        path.append(node)
    path += [node] * (len(widths) + 1 - len(path))
    bonus = sampling.draw(residual, noise)
    return verdict_of(
        draft, torch.stack(path, 1), num_kept, bonus, torch.stack(cost, 1) if measure_tv else None
    )


def native_verdict(
    draft: Draft, logits: Tensor, sampling: Sampling, rule: Acceptance, noise: Noise, joint: bool
) -> Verdict | None:
    """Return the verdict of the sampling's backend; None where it leaves the draft, the rule or the tensors to PyTorch."""
    widths, backend = draft.tree.widths, sampling.backend
    if not on_host(logits) or sampling.greedy or backend is None or backend is PYTORCH:
        return None
    budget = rule.as_numbers(len(widths))
    if budget is None or (joint and not (rule.lossless or budget.optimal)):
        return None
    shape = (1,) if joint else (len(widths), max(widths, default=0))
    u, u_bonus = noise.fine(Noise.ACCEPT, *shape), noise.fine(Noise.BONUS, 1)
    return backend.verify(draft, logits, sampling.warp, budget, u, u_bonus)


def without(q: Tensor, code: Tensor) -> Tensor:
    """Return q [B, V] without `code` [B], renormalised."""
    q = q.scatter(1, code[:, None], 0)
    return q / q.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)


def padded(verdict: Verdict, length: int) -> Verdict:
    """Pad the paths of a verdict on a shorter draft, codes and costs with them, to [B, length]."""
    num_missing = length - verdict.path.shape[1]
    if not num_missing:
        return verdict

    def pad(x: Tensor) -> Tensor:
        return torch.cat((x, x[:, -1:].expand(-1, num_missing)), 1)

    cost = None if verdict.tv_cost is None else pad(verdict.tv_cost)
    return replace(verdict, path=pad(verdict.path), next_codes=pad(verdict.next_codes), tv_cost=cost)


def verdict_of(
    draft: Draft,
    path: Tensor,
    num_kept: Tensor,
    bonus: Tensor,
    cost: Tensor | None = None,
    distribution: Tensor | None = None,
) -> Verdict:
    """Return the verdict that keeps the first `num_kept` [B] nodes of path [B, P], then `bonus` [B] (of latents [B, C])."""
    batch = torch.arange(len(path), device=path.device)[:, None]
    is_bonus = torch.arange(path.shape[1], device=path.device) == num_kept[:, None] - 1  # [B, P]
    if bonus.dim() > 1:  # [B, P, 1] for latents
        is_bonus = is_bonus[..., None]
    next_codes = torch.where(is_bonus, bonus[:, None], draft.codes[batch, path.roll(-1, 1)])
    return Verdict(path, num_kept, next_codes, bonus, cost, distribution)
