"""Joint verification: how many drafted codes are kept is decided from all their ratios p / q together.

On a chain this is block verification (arXiv 2403.10444), on a tree traversal verification (arXiv 2505.12398). Token-wise
verification ends at the first rejected code, with all that is below it. Here a ratio above 1 at one code can make up for
a ratio below 1 at another: the first path is tried as a whole from its leaf, then the next sibling of the leaf, and a
node when its children are used up. With p_u the target's distribution at a node u, and q_u the one that its children were
drawn from, without replacement and in order:

    a_u = 1 at the root; a child x of u has a_x = min(a_u p_u(x) / q_u(x), 1), with a_u, p_u, q_u as they are when x is tried
    once x and all below it are rejected:  R = [a_u p_u - q_u]+ ,  S = sum R
        p_u = R / S;  a_u = S / (S + 1 - a_u), which is 1 at the root;  q_u without x, renormalised
    a node whose children are used up is kept with probability a_u, and with it the path to it; then a code ~ p_u

The output follows p, and on a chain no other rule for a single path keeps more. A node that is tried is kept, or one
below it, with probability a_x as it is at first, whatever is below. So what a rejection leaves does not depend on how the
nodes below were rejected: a level of a tree is computed at once, a chain with all its levels, and one random number then
chooses among all nodes. On a chain a draft decides 1 + sum E[a_x] codes.

It holds for drafted codes that each follow a q in which no later code had a part. A relaxed rule replaces p at every node
with children by the distribution that one child has under it (`Acceptance.output_distribution`), which the output then
follows exactly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.tokenwise import verdict_of
from lanternpp.types import Draft, Tree, Verdict


def verify_joint(
    draft: Draft,
    logits: Tensor,
    sampling: Sampling,
    rule: Acceptance,
    noise: Noise,
    measure_tv: bool = False,
) -> Verdict:
    """A draft of N nodes, children drawn from `draft.probs`, and the target's logits [B, N, V] at them -> the verdict.

    The draft is a chain or its tree has a `layout`; the temperature must be above 0. measure_tv: also the total variation
    between p and the rule's output distribution at every kept node. Two random numbers are drawn per pass, and nothing is
    transferred to the host.
    """
    assert draft.probs is not None
    tree, p = draft.tree, sampling.probs(logits)
    q = draft.probs * (tree.children[..., :1] >= 0) if tree.chain else draft.probs
    target = p if rule.lossless else _output_distributions(draft, p, q, logits, rule)
    tails, left = rejection_tails(target, q, draft.codes, tree)
    node = (noise.fine(Noise.ACCEPT, 1) >= tails).sum(1)
    if not tree.chain:
        assert tree.layout is not None
        node = tree.layout.order[node]
    batch = torch.arange(len(node), device=node.device)
    weights = left[batch, node]
    bonus = sampling.draw(weights.where(weights.sum(-1, keepdim=True) > 0, target[batch, node]), noise)
    level = torch.arange(len(tree.widths) + 1, device=node.device)
    if tree.chain:
        path = level.minimum(node[:, None])
    else:
        above = tree.mask[batch, node, None] & (tree.depth[:, None] == level[:, None])  # [B, P, N]
        path = above.byte().argmax(-1).where(above.any(-1), node[:, None])
    cost = ((target - p).abs_().sum(-1) / 2).gather(1, path) if measure_tv else None
    return verdict_of(draft, path, tree.depth[batch, node] + 1, bonus, cost, target)


def _output_distributions(draft: Draft, p: Tensor, q: Tensor, logits: Tensor, rule: Acceptance) -> Tensor:
    """The rule's output distribution at every node that has children, p elsewhere; p, q, logits and result [B, N, V]."""
    tree = draft.tree
    spans = tree.layout.spans if tree.layout else ()
    inner = [slice(0, p.shape[1] - 1)] if tree.chain else [ranks[0] for ranks in spans]
    # A code that the format forbids is never relaxed.
    q = q.where((tree.children[..., :1] >= 0) & (logits > float("-inf")), 0)
    parts = [torch.cat([x[:, at] for at in inner], 1) for x in (p, q, tree.depth)]
    found = rule.output_distributions(parts[0], parts[1], parts[2], len(tree.widths))
    target = p.clone()
    for at, values in zip(inner, found.split([at.stop - at.start for at in inner], 1), strict=True):
        target[:, at] = values
    return target


def rejection_tails(p: Tensor, q: Tensor, codes: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """Where the verification of a draft ends, and the weights of the code drawn there.

    p, q [B, N, V], q of a chain 0 after its last code; codes [B, N] -> (tails [B, N - 1], left [B, N, V]).

    tails: the probability that all nodes from the i-th on are rejected, i = 1, 2 .., in the order of `layout.order`, those of a
    chain in theirs. left: the weights of the code after every node, by the node's id.
    """
    return chain_tails(p, q, codes) if tree.chain else tree_tails(p, q, codes, tree)


def chain_tails(p: Tensor, q: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """`rejection_tails` of chains, all levels at once."""
    weight = node_weights(p, q, codes)
    left = (p * weight[..., None].to(p.dtype)).sub_(q).clamp_(min=0)
    mass = left.sum(-1).double()
    either = mass + 1 - weight
    return all_rejected((mass / either).where(either > 0, 1)), left


def tree_tails(p: Tensor, q: Tensor, codes: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """`rejection_tails` of trees with a `layout`, a level at once, rank by rank."""
    assert tree.layout is not None
    nodes, child = codes.shape[1], tree.children
    code = codes.gather(1, child.clamp(min=0).flatten(1)).view_as(child)  # [B, N, K]
    chance = q.gather(-1, code).double()
    # A code that repeats a sibling's is there because the drafter had no other to offer.
    again = (code[..., :, None] == code[..., None, :]).tril(-1).any(-1)
    there = (child >= 0) & (chance > 0) & ~again
    chance = chance.where(there, 0)
    # the mass that q had left when the child was drawn
    mass = q.sum(-1, keepdim=True, dtype=torch.float64) - chance.cumsum(-1) + chance
    mass = mass.maximum(chance).clamp(min=torch.finfo(p.dtype).tiny)
    odds, scale = (mass / chance).where(there, 0), (1 / mass).where(there, 0).to(p.dtype)
    # The weights of missing children are written to a place after the last node.
    child = child.where(child >= 0, nodes)
    left = p.clone()
    # a of a node until its children are used up; then the probability that it is kept
    weight = torch.zeros(len(codes), nodes + 1, dtype=torch.float64, device=p.device)
    weight[:, 0] = 1
    for spans in tree.layout.spans:
        left[:, spans[0]].mul_(weight[:, spans[0], None].to(p.dtype))
        for rank, at in enumerate(spans):
            here = left[:, at]
            ratio = here.gather(-1, code[:, at, rank, None])[..., 0] * odds[:, at, rank]
            weight.scatter_(1, child[:, at, rank], ratio.clamp_(max=1))
            # The codes of earlier siblings are subtracted again, without effect: a rejected one's code has 0 left.
            here.addcmul_(q[:, at], scale[:, at, rank, None], value=-1).clamp_(min=0)
            rest = here.sum(-1).double()
            either = rest + 1 - weight[:, at]
            either = either.where(either > 0, 1)
            weight[:, at] = rest / either
            here.div_(either.to(p.dtype)[..., None])
    return all_rejected(weight[:, tree.layout.order]), left


def node_weights(p: Tensor, q: Tensor, codes: Tensor) -> Tensor:
    """a [B, g + 1] float64 at the root of a chain, where it is 1, and at each of its g codes; p, q [B, g + 1, V], codes [B, g + 1]."""
    at = codes[:, 1:, None]
    chance = q[:, :-1].gather(-1, at)[..., 0]
    ratio = (p[:, :-1].gather(-1, at)[..., 0] / chance).where(chance > 0, 0)
    total = F.pad(ratio.double().log().cumsum(1), (1, 0))
    return (total - total.cummax(1).values).exp()


def rejected_distribution(p: Tensor, q: Tensor, codes: Tensor) -> Tensor:
    """The distributions [B, g, V] that the rejected codes of a chain follow; arguments as of `node_weights`.

    Let i be after the last code that is kept. x_i was drawn from q_i, and would have been kept, itself or one after it,
    with probability a_i = min(a_{i-1} p_i(x_i) / q_i(x_i), 1). So given that it was not, and given the codes before it, x_i
    follows q_i (1 - a_i), normalised, which is [q_i - a_{i-1} p_i]+.
    """
    weight = node_weights(p, q, codes)[:, :-1, None].to(p.dtype)
    left = torch.addcmul(q[:, :-1], p[:, :-1], weight, value=-1).clamp_(min=0)
    mass = left.sum(-1, keepdim=True)
    return (left / mass).where(mass > 0, q[:, :-1])


def all_rejected(kept: Tensor) -> Tensor:
    """kept [B, M], the probability that each of M nodes is kept once it is tried -> [B, M - 1], that no node from the i-th on is, i = 1, 2 ..."""
    return (1 - kept[:, 1:]).flip(1).cumprod(1).flip(1)
