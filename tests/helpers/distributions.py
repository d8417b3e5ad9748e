"""The distributions the library must follow, written a second time, in plain Python, from the papers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Distribution = list[float]
Relax = Callable[[Distribution, int], Distribution]


def chi_square(counts: Tensor, distribution: Tensor) -> float:
    """The p-value of `counts` under `distribution` (any shape, any scale). A code the distribution forbids must not occur."""
    counts, distribution = counts.flatten().double(), distribution.flatten().double()
    distribution = distribution / distribution.sum() * counts.sum()
    assert not counts[distribution == 0].any(), "a code of probability 0 was drawn"
    few = distribution < 5  # pooled into one cell
    counts = torch.cat((counts[~few], counts[few].sum()[None]))
    distribution = torch.cat((distribution[~few], distribution[few].sum()[None]))
    counts, distribution = counts[distribution > 0], distribution[distribution > 0]
    excess = ((counts - distribution) ** 2 / distribution).sum()
    return torch.special.gammaincc(torch.tensor((len(distribution) - 1) / 2).double(), excess / 2).item()


def two_samples(one: Tensor, other: Tensor) -> float:
    """The p-value of two tensors of as many rows, of whole numbers [n, d]: do their rows follow one distribution?"""
    cells = torch.cat((one, other)).unique(dim=0, return_inverse=True)[1]
    counts = torch.stack([torch.bincount(half, minlength=int(cells.max()) + 1) for half in cells.chunk(2)])
    few = counts.sum(0) < 10  # pooled into one cell
    counts = torch.cat((counts[:, ~few], counts[:, few].sum(1, keepdim=True)), 1).double()
    a, b = counts[:, counts.sum(0) > 0]
    excess = ((a - b) ** 2 / (a + b)).sum()
    return torch.special.gammaincc(torch.tensor((len(a) - 1) / 2).double(), excess / 2).item()


def tally(codes: Tensor, vocab: int) -> Tensor:
    """How often every sequence occurs: codes [B, n] -> [vocab ** n]."""
    weight = vocab ** torch.arange(codes.shape[1] - 1, -1, -1)
    return torch.bincount((codes * weight).sum(1), minlength=vocab ** codes.shape[1])


def distance(a: Tensor, b: Tensor) -> float:
    """The greatest difference between two tensors."""
    return (a - b).abs().max().item()


def no_relax(p: Distribution, x: int) -> Distribution:
    return list(p)


def additive(near: Sequence[Sequence[int]], delta: float) -> Relax:
    """LANTERN: the longest prefix of the neighbours whose mass is at most delta."""
    return lambda p, x: _move(p, x, near[x], delta)


def multiplicative(near: Sequence[Sequence[int]], lam: float) -> Relax:
    """LANTERN++: the longest prefix of the neighbours whose mass is at most (lambda - 1) p(x)."""
    return lambda p, x: _move(p, x, near[x], (lam - 1) * p[x])


def _move(p: Distribution, x: int, near: Sequence[int], budget: float) -> Distribution:
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


def _normal(p: Distribution) -> Distribution:
    return [v / sum(p) for v in p]


def round_distribution(
    p: Distribution, q: Distribution, tries: int, relax: Relax = no_relax, optimal: bool = False
) -> Distribution:
    """The distribution of the code a round decides after the root: `tries` children drawn from q without replacement.

    optimal: after a refusal what p has beyond q is drawn from, not what the relaxed p has.
    """
    if tries == 0 or sum(q) == 0:
        return list(p)
    distribution = [0.0] * len(p)
    for x, chance in enumerate(q):
        if chance == 0:
            continue
        bent = relax(p, x)
        accept = min(1.0, bent[x] / chance)
        distribution[x] += chance * accept
        if accept == 1:
            continue
        left = [max(b - c, 0.0) for b, c in zip(p if optimal else bent, q, strict=True)]
        left = _normal(left) if sum(left) > 0 else bent
        others = [0.0 if y == x else c for y, c in enumerate(q)]
        others = _normal(others) if sum(others) > 0 else others
        for y, after in enumerate(round_distribution(left, others, tries - 1, relax, optimal)):
            distribution[y] += chance * (1 - accept) * after
    return distribution


def point_round_distribution(
    p: Distribution, children: Sequence[int], relax: Relax = no_relax, optimal: bool = False
) -> Distribution:
    """The same for children that are a top-k, not drawn: point masses."""
    distribution, r, reach = [0.0] * len(p), list(p), 1.0
    for x in children:
        bent = relax(r, x)
        distribution[x] += reach * bent[x]
        reach *= 1 - bent[x]
        left = [0.0 if y == x else b for y, b in enumerate(r if optimal else bent)]
        r = _normal(left) if sum(left) > 0 else bent
    return [a + reach * b for a, b in zip(distribution, r, strict=True)]


def drawn(q: Tensor, count: int, seed: int = 0) -> Tensor:
    """q [..., V] -> codes [..., count] drawn without replacement, in order; those of probability 0 come last."""
    noise = torch.rand(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (q / -noise.log()).topk(count, -1).indices


# Drafts of every context, enumerated. The context of level i is the i codes before it, as a number to the base V.

Contexts = list[Tensor]  # level by level, [V ** i, V]
KINDS = ["random", "near", "with zeros", "a point", "equal", "forced", "all of them"]  # of `contexts`
Stops = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def contexts(vocab: int, depth: int, kind: str, seed: int = 0) -> tuple[Contexts, Contexts]:
    """What a target says at `depth` + 1 levels and a drafter at `depth`, in every context.

    kind: "random"; "near", a drafter close to the target; "with zeros" in both; "a point", a drafter sure of a code;
    "equal"; "forced", a target that is sure of a code at every other context, and a drafter with it at half of those;
    or "all of them", one context of each in turn.
    """
    generator = torch.Generator().manual_seed(seed)

    def rows(level: int, power: float) -> Tensor:
        made = torch.rand(vocab**level, vocab, dtype=torch.float64, generator=generator).pow(power) + 1e-3
        return made / made.sum(-1, keepdim=True)

    p, q = [], []
    for level in range(depth + 1):
        one, other = rows(level, 2.0), rows(level, 2.0)
        place = torch.arange(len(one)) + level
        sure = torch.nn.functional.one_hot(place % vocab, vocab).double()

        def chosen(name: str, place: Tensor = place) -> Tensor:
            known = ("random", "near", "with zeros", "a point", "equal", "forced")
            here = place % len(known) == known.index(name)
            return (here if kind == "all of them" else here | True if kind == name else here & False)[:, None]

        other = (0.8 * one + 0.2 * other).where(chosen("near"), other)
        for each in (one, other):
            holes = chosen("with zeros") & (torch.rand(each.shape, generator=generator) < 0.4) & (sure == 0)
            each[holes] = 0
            each /= each.sum(-1, keepdim=True)
        other = sure.where(chosen("a point"), other)
        one = sure.where(chosen("forced") & (place % 2 == 0)[:, None], one)
        other = sure.where(chosen("forced") & (place % 4 == 0)[:, None], other)
        p.append(one)
        q.append(one.where(chosen("equal"), other))
    return p, q[:depth]


def sequences(p: Contexts) -> Tensor:
    """The probability of every sequence of len(p) codes."""
    distribution = torch.ones(1, dtype=torch.float64)
    for level in p:
        distribution = (distribution[:, None] * level).flatten()
    return distribution


def chain_distribution(
    stops: Stops, p: Contexts, q: Contexts, drawn_from: Contexts | None = None
) -> tuple[Tensor, Tensor]:
    """Over all drafts of a chain: the distribution of all sequences, the target going on where a draft ended, and how often
    guess 1, 2 .. is kept. drawn_from: what guesses are drawn from, if not q.
    """
    depth, vocab = len(q), p[0].shape[-1]
    drafts = torch.cartesian_prod(*[torch.arange(vocab)] * depth).view(-1, depth)
    before = torch.cat((torch.zeros_like(drafts[:, :1]), drafts), 1)
    at = torch.zeros(len(drafts), depth + 1, dtype=torch.int64)
    for level in range(depth):
        at[:, level + 1] = at[:, level] * vocab + drafts[:, level]
    ps = torch.stack([p[level][at[:, level]] for level in range(depth + 1)], 1)
    qs = torch.stack([q[level][at[:, level]] for level in range(depth)] + [torch.zeros_like(ps[:, 0])], 1)
    chance = torch.ones(len(drafts), dtype=torch.float64)
    for level, table in enumerate(drawn_from or q):
        chance = chance * table[at[:, level]].gather(1, drafts[:, level, None])[:, 0]
    ps, qs, before, at, chance = (x[chance > 0] for x in (ps, qs, before, at, chance))
    behind, left = stops(ps, qs, before)
    fewer = torch.cat((torch.zeros_like(chance[:, None]), behind, torch.ones_like(chance[:, None])), 1)
    ends = fewer.diff(dim=1) * chance[:, None]  # [D, g + 1]
    distribution = torch.zeros(1, dtype=torch.float64)
    for level in range(depth + 1):
        mass = left[:, level].sum(-1, keepdim=True)
        bonus = (left[:, level] / mass).where(mass > 0, 0) * ends[:, level, None]
        distribution = (distribution[:, None] * p[level]).index_add(0, at[:, level], bonus).flatten()
    return distribution, (chance[:, None] * (1 - behind)).sum(0)
