"""The laws the library must follow, written a second time, in plain Python, from the papers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Law = list[float]
Relax = Callable[[Law, int], Law]


def chi_square(counts: Tensor, law: Tensor) -> float:
    """The p-value of `counts` under `law` (any shape, any scale). A code the law forbids must not occur."""
    counts, law = counts.flatten().double(), law.flatten().double()
    law = law / law.sum() * counts.sum()
    assert not counts[law == 0].any(), "a code of probability 0 was drawn"
    few = law < 5  # pooled into one cell
    counts = torch.cat((counts[~few], counts[few].sum()[None]))
    law = torch.cat((law[~few], law[few].sum()[None]))
    counts, law = counts[law > 0], law[law > 0]
    excess = ((counts - law) ** 2 / law).sum()
    return torch.special.gammaincc(torch.tensor((len(law) - 1) / 2).double(), excess / 2).item()


def tally(codes: Tensor, vocab: int) -> Tensor:
    """How often every sequence occurs: codes [B, n] -> [vocab ** n]."""
    weight = vocab ** torch.arange(codes.shape[1] - 1, -1, -1)
    return torch.bincount((codes * weight).sum(1), minlength=vocab ** codes.shape[1])


def no_relax(p: Law, x: int) -> Law:
    return list(p)


def additive(near: Sequence[Sequence[int]], delta: float) -> Relax:
    """LANTERN: the longest prefix of the neighbours whose mass is at most delta."""
    return lambda p, x: _move(p, x, near[x], delta)


def multiplicative(near: Sequence[Sequence[int]], lam: float) -> Relax:
    """LANTERN++: the longest prefix of the neighbours whose mass is at most (lambda - 1) p(x)."""
    return lambda p, x: _move(p, x, near[x], (lam - 1) * p[x])


def _move(p: Law, x: int, near: Sequence[int], budget: float) -> Law:
    bent, lent = list(p), 0.0
    if 1.0 in p:  # forced by the format
        return bent
    for y in near:
        if lent + p[y] > budget:
            break
        lent += p[y]
        bent[y] = 0.0
    bent[x] = p[x] + lent
    return bent


def _normal(p: Law) -> Law:
    return [v / sum(p) for v in p]


def round_law(p: Law, q: Law, tries: int, relax: Relax = no_relax, optimal: bool = False) -> Law:
    """The law of the code a round decides after the root: `tries` children drawn from q without replacement.

    optimal: after a refusal what p has beyond q is drawn from, not what the relaxed p has.
    """
    if tries == 0 or sum(q) == 0:
        return list(p)
    law = [0.0] * len(p)
    for x, chance in enumerate(q):
        if chance == 0:
            continue
        bent = relax(p, x)
        accept = min(1.0, bent[x] / chance)
        law[x] += chance * accept
        if accept == 1:
            continue
        left = [max(b - c, 0.0) for b, c in zip(p if optimal else bent, q, strict=True)]
        left = _normal(left) if sum(left) > 0 else bent
        others = [0.0 if y == x else c for y, c in enumerate(q)]
        others = _normal(others) if sum(others) > 0 else others
        for y, after in enumerate(round_law(left, others, tries - 1, relax, optimal)):
            law[y] += chance * (1 - accept) * after
    return law


def point_round_law(p: Law, children: Sequence[int], relax: Relax = no_relax, optimal: bool = False) -> Law:
    """The same for children that are a top-k, not drawn: point masses."""
    law, r, reach = [0.0] * len(p), list(p), 1.0
    for x in children:
        bent = relax(r, x)
        law[x] += reach * bent[x]
        reach *= 1 - bent[x]
        left = [0.0 if y == x else b for y, b in enumerate(r if optimal else bent)]
        r = _normal(left) if sum(left) > 0 else bent
    return [a + reach * b for a, b in zip(law, r, strict=True)]


def drawn(q: Tensor, count: int, seed: int = 0) -> Tensor:
    """q [..., V] -> codes [..., count] drawn without replacement, in order; those of probability 0 come last."""
    noise = torch.rand(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (q / -noise.log()).topk(count, -1).indices
