"""Traversal verification of a tree (arXiv 2505.12398): from the first leaf up, a node once all below it were refused.

It is to a tree what block verification is to a chain. At every node v there is p_v, what is left of the target's
distribution; q_v, what its children were drawn from, in order and without replacement; and a weight a_v:

    a_root = 1;  for child x of u:  a = min(a_u p_u(x) / q_u(x), 1)
    a node whose children were all refused is accepted with probability a_v: the path to it is kept, then a code ~ p_v
    where it is refused, v being child x of u:
        R = [a_u p_u - q_u]+ , S = sum R;   p_u <- R / S;   a_u <- S / (S + 1 - a_u);   q_u <- q_u without x, renormalised

The nodes are tried in the order that the shape of the tree fixes, each after all that stand below it, the root at last and
with certainty. The output follows p, and a node is kept with probability a_v, whatever stands below or behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify import law_of, verdict_of, without
from lanternpp.types import Draft, Verdict


def verify_traversal(
    draft: Draft, logits: Tensor, sampling: Sampling, rule: Acceptance, noise: Noise, measure: bool = False
) -> Verdict:
    """A tree of N nodes, children drawn from `draft.probs`, and the target's logits [B, N, V] -> the path that is kept.

    The temperature must be above 0, and the tree of one shape for all samples (`Tree.parents`). measure: also the total
    variation of the rule's law at every kept node, which is exact. A rule's law is that of a single child. Two numbers are
    drawn a pass; on a CPU the loop is left once every sample has accepted a node.
    """
    tree, p = draft.tree, sampling.probs(logits)
    assert tree.parents is not None
    law, q = law_of(draft, logits, p, rule)
    u, hasty = noise.fine(Noise.ACCEPT, 1)[:, 0], p.device.type == "cpu"
    batch = torch.arange(len(p), device=p.device)
    last, weights, before = torch.zeros_like(batch), law[:, 0], torch.zeros_like(u)
    done = torch.zeros_like(batch, dtype=torch.bool)
    for node, chance, left in trials(law, q, draft.codes, tree.parents):
        before = before + (1 - before) * chance  # that some node up to this one is accepted
        here = (u < before) & ~done
        if hasty and not here.any():
            continue
        last = torch.where(here, node, last)
        weights = left.where(here[:, None], weights)
        done = done | here
        if hasty and done.all():
            break
    above = tree.mask[batch, last]  # a node's ancestors, whose ids ascend
    ids = torch.arange(p.shape[1], device=p.device).where(above, p.shape[1]).sort(1).values
    path = ids[:, : len(tree.widths) + 1].minimum(last[:, None])
    spent = ((law - p).abs_().sum(-1) / 2).gather(1, path) if measure else None
    return verdict_of(draft, path, above.sum(1), sampling.draw(weights, noise), spent)


def trials(
    p: Tensor, q: Tensor, codes: Tensor, parents: Sequence[int]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The nodes in the order they are tried: node, the probability [B] that it is then accepted, what is left of its p [B, V].

    p, q [B, N, V], codes [B, N], parents of N nodes, the root's -1; children in trial order. A child that could not be drawn,
    because the ones before it took all that q had, is no child.
    """
    below: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        below[parent].append(node)

    def tried(node: int, weight: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        left, offered = p[:, node], q[:, node]
        for child in below[node]:
            at = codes[:, child, None]
            chance = offered.gather(1, at)[:, 0]
            there = chance > 0
            ratio = (left.gather(1, at)[:, 0] / chance).where(there, 0)
            yield from tried(child, (weight * ratio).clamp(max=1))
            rest, less = refused(left, offered, weight)
            left, weight = rest.where(there[:, None], left), less.where(there, weight)
            offered = without(offered, codes[:, child]).where(there[:, None], offered)
        yield node, weight, left

    yield from tried(0, torch.ones_like(p[:, 0, 0], dtype=torch.float64))


def refused(left: Tensor, q: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What is left [B, V] at a node, and its weight [B], once its next child, drawn from q [B, V], was refused."""
    rest = (left * weight[:, None].to(left.dtype)).sub_(q).clamp_(min=0)
    mass = rest.sum(-1)
    either = mass.double() + 1 - weight
    return (rest / mass[:, None]).where(mass[:, None] > 0, left), (mass / either).where(either > 0, 1)
