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

The output follows p, and on a chain no other rule for a single path keeps more. When a node is tried, it or a node below
it is kept with probability a_x, the first value of a, whatever the nodes below are. So R does not depend on how the nodes
below were rejected: a tree is computed a level at a time, a chain with all its levels at once, and one random number then
chooses among all nodes. On a chain a draft decides 1 + sum E[a_x] codes.

The output follows p if each drafted code follows a q that does not depend on later codes. A relaxed rule replaces p at every
node with children by the distribution that one child has under the rule (`Acceptance.output_distribution`), which the
output then follows exactly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.tokenwise import native_verdict, verdict_of
from lanternpp.types import Draft, Tree, Verdict


def verify_joint(
    draft: Draft,
    logits: Tensor,
    sampling: Sampling,
    rule: Acceptance,
    noise: Noise,
    measure_tv: bool = False,
) -> Verdict:
    """Verify a draft of N nodes, children drawn from `draft.probs`, by the target's logits [B, N, V] at the nodes.

    The draft is a chain or its tree has a `layout`; the temperature must be above 0. measure_tv: also return the total
    variation between p and the rule's output distribution at every kept node. Two random numbers are drawn per pass, and
    nothing is transferred to the host.
    """
    if not measure_tv and (verdict := native_verdict(draft, logits, sampling, rule, noise, joint=True)):
        return verdict
    assert draft.probs is not None
    tree = draft.tree
    p = sampling.probs(logits)
    q = draft.probs * (tree.children[..., :1] >= 0) if tree.chain else draft.probs
    target = p if rule.lossless else _output_distributions(draft, p, q, logits, rule)
    tails, residuals = rejection_tails(target, q, draft.codes, tree)
    # `tails` is the CDF of the last kept node, which one random number inverts.
    node = (noise.fine(Noise.ACCEPT, 1) >= tails).sum(1)  # [B]
    if not tree.chain:
        assert tree.layout is not None
        node = tree.layout.order[node]
    batch = torch.arange(len(node), device=node.device)
    residual = residuals[batch, node]  # [B, V]
    bonus = sampling.draw(residual.where(residual.sum(-1, keepdim=True) > 0, target[batch, node]), noise)
    level = torch.arange(len(tree.widths) + 1, device=node.device)  # [P]
    if tree.chain:
        path = level.minimum(node[:, None])
    else:
        on_path = tree.mask[batch, node, None] & (tree.depth[:, None] == level[:, None])  # [B, P, N]
        path = on_path.byte().argmax(-1).where(on_path.any(-1), node[:, None])
    cost = ((target - p).abs_().sum(-1) / 2).gather(1, path) if measure_tv else None
    return verdict_of(draft, path, tree.depth[batch, node] + 1, bonus, cost, target)


def _output_distributions(draft: Draft, p: Tensor, q: Tensor, logits: Tensor, rule: Acceptance) -> Tensor:
    """Return the rule's output distribution at every node that has children, p elsewhere; p, q, logits and result [B, N, V]."""
    tree = draft.tree
    if tree.chain:
        spans = [slice(0, p.shape[1] - 1)]  # ids of the nodes with children
    else:
        assert tree.layout is not None
        spans = [ranks[0] for ranks in tree.layout.spans]
    # A code that the format forbids is never relaxed.
    q = q.where((tree.children[..., :1] >= 0) & (logits > float("-inf")), 0)
    p_inner, q_inner, depth = (torch.cat([x[:, span] for span in spans], 1) for x in (p, q, tree.depth))
    outputs = rule.output_distributions(p_inner, q_inner, depth, len(tree.widths))
    target = p.clone()
    sizes = [span.stop - span.start for span in spans]
    for span, output in zip(spans, outputs.split(sizes, 1), strict=True):
        target[:, span] = output
    return target


def rejection_tails(p: Tensor, q: Tensor, codes: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """Return the distribution of the last kept node, and that of the code drawn after each node.

    p, q [B, N, V], q of a chain 0 after its last code; codes [B, N] -> (tails [B, N - 1], residuals [B, N, V]).

    tails: the probability that all nodes from the i-th on are rejected, i = 1, 2 .., in the order of `layout.order`, or of the
    chain. residuals: the weights of the code after every node, by the node's id.
    """
    return chain_tails(p, q, codes) if tree.chain else tree_tails(p, q, codes, tree)


def chain_tails(p: Tensor, q: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `rejection_tails` of chains, all levels at once."""
    weight = node_weights(p, q, codes)  # a, [B, N]
    residuals = (p * weight[..., None].to(p.dtype)).sub_(q).clamp_(min=0)  # R, [B, N, V]
    mass = residuals.sum(-1).double()  # S, [B, N]
    total = mass + 1 - weight
    return all_rejected((mass / total).where(total > 0, 1)), residuals


def tree_tails(p: Tensor, q: Tensor, codes: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """Compute `rejection_tails` of trees with a `layout`, a level at a time, rank by rank."""
    assert tree.layout is not None
    num_nodes, child = codes.shape[1], tree.children
    code = codes.gather(1, child.clamp(min=0).flatten(1)).view_as(child)  # [B, N, K]
    q_code = q.gather(-1, code).double()
    # A child repeats a sibling's code where the drafter had no other code to offer.
    repeated = (code[..., :, None] == code[..., None, :]).tril(-1).any(-1)
    drawn = (child >= 0) & (q_code > 0) & ~repeated
    q_code = q_code.where(drawn, 0)
    # the mass of q when the child was drawn, without its earlier siblings
    q_mass = q.sum(-1, keepdim=True, dtype=torch.float64) - q_code.cumsum(-1) + q_code
    q_mass = q_mass.maximum(q_code).clamp(min=torch.finfo(p.dtype).tiny)
    inverse_q = (q_mass / q_code).where(drawn, 0)  # 1 / q_u(x), [B, N, K]
    scale = (1 / q_mass).where(drawn, 0).to(p.dtype)  # renormalises q_u, [B, N, K]
    # The weights of missing children are written to a column after the last node.
    child = child.where(child >= 0, num_nodes)
    residuals = p.clone()
    # a of a node until its children are used up; then the probability that the node is kept
    weight = torch.zeros(len(codes), num_nodes + 1, dtype=torch.float64, device=p.device)
    weight[:, 0] = 1
    for spans in tree.layout.spans:
        residuals[:, spans[0]].mul_(weight[:, spans[0], None].to(p.dtype))
        for rank, span in enumerate(spans):
            residual = residuals[:, span]  # a_u p_u of W nodes, then R: a view [B, W, V]
            ratio = residual.gather(-1, code[:, span, rank, None])[..., 0] * inverse_q[:, span, rank]
            weight.scatter_(1, child[:, span, rank], ratio.clamp_(max=1))
            # The codes of earlier siblings are subtracted again, without effect: their residual is 0 already.
            residual.addcmul_(q[:, span], scale[:, span, rank, None], value=-1).clamp_(min=0)
            mass = residual.sum(-1).double()  # S
            total = mass + 1 - weight[:, span]
            total = total.where(total > 0, 1)
            weight[:, span] = mass / total
            residual.div_(total.to(p.dtype)[..., None])
    return all_rejected(weight[:, tree.layout.order]), residuals


def node_weights(p: Tensor, q: Tensor, codes: Tensor) -> Tensor:
    """Return a [B, g + 1] float64 at a chain's root, where a is 1, and at its g codes; p, q [B, g + 1, V], codes [B, g + 1]."""
    code = codes[:, 1:, None]
    q_code = q[:, :-1].gather(-1, code)[..., 0]  # [B, g]
    ratio = (p[:, :-1].gather(-1, code)[..., 0] / q_code).where(q_code > 0, 0)
    # In logarithms a_i = min(a_{i-1} ratio_i, 1) is the product of the ratios over its maximum so far, the root's 1 included.
    log_product = F.pad(ratio.double().log().cumsum(1), (1, 0))
    return (log_product - log_product.cummax(1).values).exp()


def rejected_distribution(p: Tensor, q: Tensor, codes: Tensor) -> Tensor:
    """Return the distributions [B, g, V] that the rejected codes of a chain follow; arguments as of `node_weights`.

    Let x_i be any code after the last kept one. x_i was drawn from q_i, and x_i or a code after it would have been kept with
    probability a_i = min(a_{i-1} p_i(x_i) / q_i(x_i), 1). So given the rejection and the codes before, x_i follows
    q_i (1 - a_i), normalised, which is [q_i - a_{i-1} p_i]+.
    """
    weight = node_weights(p, q, codes)[:, :-1, None].to(p.dtype)
    rejected = torch.addcmul(q[:, :-1], p[:, :-1], weight, value=-1).clamp_(min=0)
    mass = rejected.sum(-1, keepdim=True)
    return (rejected / mass).where(mass > 0, q[:, :-1])


def all_rejected(keep_prob: Tensor) -> Tensor:
    """Return the probability that all nodes from the i-th on are rejected, i = 1 .. M - 1; keep_prob [B, M] of tried nodes."""
    return (1 - keep_prob[:, 1:]).flip(1).cumprod(1).flip(1)
