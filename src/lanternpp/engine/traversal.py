"""Traversal verification of a tree (arXiv 2505.12398): leaves are tried first, and what a refusal leaves goes to the next node.

The walk from the root (`verify`) drops a node with all that is below it at its first refusal. Here the first path is
tried as a whole from its leaf, as block verification does, then the next sibling of the leaf, and a node when
its children are used up. With p_u the target's distribution at a node u and q_u the one that its children were drawn
from, without replacement and in order:

    a_u = 1 at the root; a child x of u has a_x = min(a_u p_u(x) / q_u(x), 1), with a_u, p_u, q_u as they are when u comes to it
    once x and all below it are refused:  R = [a_u p_u - q_u]+ ,  S = sum R
        p_u = R / S;  a_u = S / (S + 1 - a_u), which is 1 at the root;  q_u without x, renormalised
    a node whose children are used up is kept with probability a_u, and with it the path to it; then a code ~ p_u

The output follows p. A node that is come to is kept, or one below it, with probability a_x as it is at first, whatever is below.
So what a refusal leaves does not depend on how the nodes below were refused: a level of the tree is computed at once,
rank by rank, and one random number then chooses among all nodes. On a chain this is block verification.

A relaxed rule replaces p at every node with children by the law that it has for a single guess (`Acceptance.output_distribution`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.engine.block import all_refused, verify_block
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify import verdict_of
from lanternpp.types import Draft, Tree, Verdict


def verify_traversal(
    draft: Draft,
    logits: Tensor,
    sampling: Sampling,
    rule: Acceptance,
    noise: Noise,
    measure_tv: bool = False,
) -> Verdict:
    """A tree of N nodes, children drawn from `draft.probs`, and the target's logits [B, N, V] -> the verdict.

    The tree is a chain or has a `layout`; the temperature must be above 0. measure_tv: also the total variation between p
    and the rule's output law at every kept node. Two random numbers are drawn per pass, and nothing is transferred to the host.
    """
    tree = draft.tree
    if tree.chain:
        return verify_block(draft, logits, sampling, rule, noise, measure_tv)
    assert tree.layout is not None and draft.probs is not None
    p = sampling.probs(logits)
    law = p if rule.lossless else _laws(draft, p, logits, rule)
    behind, left = stops(law, draft.probs, draft.codes, tree)
    node = tree.layout.order[(noise.fine(Noise.ACCEPT, 1) >= behind).sum(1)]
    batch = torch.arange(len(node), device=node.device)
    weights = left[batch, node]
    bonus = sampling.draw(weights.where(weights.sum(-1, keepdim=True) > 0, law[batch, node]), noise)
    level = torch.arange(len(tree.widths) + 1, device=node.device)
    above = tree.mask[batch, node, None] & (tree.depth[:, None] == level[:, None])  # [B, P, N]
    path = above.byte().argmax(-1).where(above.any(-1), node[:, None])
    cost = ((law - p).abs_().sum(-1) / 2).gather(1, path) if measure_tv else None
    return verdict_of(draft, path, tree.depth[batch, node] + 1, bonus, cost, law)


def stops(p: Tensor, q: Tensor, codes: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """At which node of a tree with a `layout` verification ends, and the weights of the code drawn there.

    p, q [B, N, V]; codes [B, N] -> the probability [B, N - 1] that all nodes from the i-th of `layout.order` on are
    refused, i = 1, 2 .., and the weights [B, N, V] of the code behind every node, by its id.
    """
    assert tree.layout is not None
    nodes, child = codes.shape[1], tree.children
    code = codes.gather(1, child.clamp(min=0).flatten(1)).view_as(child)  # [B, N, K]
    chance = q.gather(-1, code).double()
    # a code that repeats a sibling's stands where the drafter had no other to offer
    again = (code[..., :, None] == code[..., None, :]).tril(-1).any(-1)
    there = (child >= 0) & (chance > 0) & ~again
    chance = chance.where(there, 0)
    # the mass that q had left when the child was drawn
    mass = q.sum(-1, keepdim=True, dtype=torch.float64) - chance.cumsum(-1) + chance
    mass = mass.maximum(chance).clamp(min=torch.finfo(p.dtype).tiny)
    odds, scale = (mass / chance).where(there, 0), (1 / mass).where(there, 0).to(p.dtype)
    child = child.where(
        child >= 0, nodes
    )  # the weights of missing children go to a place behind the last node
    left = p.clone()
    weight = torch.zeros(len(codes), nodes + 1, dtype=torch.float64, device=p.device)
    weight[:, 0] = 1
    for spans in tree.layout.spans:
        left[:, spans[0]].mul_(weight[:, spans[0], None].to(p.dtype))
        for rank, at in enumerate(spans):
            here = left[:, at]
            ratio = here.gather(-1, code[:, at, rank, None])[..., 0] * odds[:, at, rank]
            weight.scatter_(1, child[:, at, rank], ratio.clamp_(max=1))
            # The codes of earlier siblings are subtracted again, which changes nothing: where one was refused its code has 0 left.
            here.addcmul_(q[:, at], scale[:, at, rank, None], value=-1).clamp_(min=0)
            rest = here.sum(-1).double()
            either = rest + 1 - weight[:, at]
            either = either.where(either > 0, 1)
            weight[:, at] = rest / either
            here.div_(either.to(p.dtype)[..., None])
    return all_refused(weight[:, tree.layout.order]), left


def _laws(draft: Draft, p: Tensor, logits: Tensor, rule: Acceptance) -> Tensor:
    """The rule's output law at every node that has children, p elsewhere, [B, N, V]; p and logits [B, N, V]."""
    tree = draft.tree
    assert tree.layout is not None and draft.probs is not None
    inner = [spans[0] for spans in tree.layout.spans]
    permitted = logits > float("-inf")  # what the format forbids is never relaxed
    q = draft.probs.where((tree.children[..., :1] >= 0) & permitted, 0)
    parts = [torch.cat([x[:, at] for at in inner], 1) for x in (p, q, tree.depth)]
    laws, law = rule.output_distributions(parts[0], parts[1], parts[2], len(inner)), p.clone()
    for at, found in zip(inner, laws.split([at.stop - at.start for at in inner], 1), strict=True):
        law[:, at] = found
    return law
