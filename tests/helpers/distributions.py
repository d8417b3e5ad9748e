"""The distributions the library must follow, as a second implementation in plain Python, from the papers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lanternpp.trees.static import Shape, StaticTree, chain
from lanternpp.types import Draft, Tree

Distribution = list[float]
Relax = Callable[[Distribution, int], Distribution]


def chi_square(counts: Tensor, distribution: Tensor) -> float:
    """The p-value of `counts` under `distribution` (any shape, any scale). A code the distribution forbids must not occur."""
    counts, distribution = counts.flatten().double(), distribution.flatten().double()
    distribution = distribution / distribution.sum() * counts.sum()
    assert not counts[distribution == 0].any(), "a code of probability 0 was drawn"
    rare = distribution < 5  # pooled into one cell
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    distribution = torch.cat((distribution[~rare], distribution[rare].sum()[None]))
    counts, distribution = counts[distribution > 0], distribution[distribution > 0]
    return _p_value((counts - distribution) ** 2 / distribution)


def two_samples(one: Tensor, other: Tensor) -> float:
    """The p-value of two tensors of as many rows, of integers [n, d]: do their rows follow one distribution?"""
    cells = torch.cat((one, other)).unique(dim=0, return_inverse=True)[1]
    counts = torch.stack([torch.bincount(half, minlength=int(cells.max()) + 1) for half in cells.chunk(2)])
    rare = counts.sum(0) < 10  # pooled into one cell
    counts = torch.cat((counts[:, ~rare], counts[:, rare].sum(1, keepdim=True)), 1).double()
    a, b = counts[:, counts.sum(0) > 0]
    return _p_value((a - b) ** 2 / (a + b))


def _p_value(excess: Tensor) -> float:
    """How likely a sum of squares, one for each cell, is at least this great by chance."""
    freedom = torch.tensor((len(excess) - 1) / 2).double()
    return torch.special.gammaincc(freedom, excess.sum() / 2).item()


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
    relaxed, moved = list(p), 0.0
    if 1.0 in p:  # forced by the format
        return relaxed
    for y in near:
        if moved + p[y] > budget:
            break
        moved += p[y]
        relaxed[y] = 0.0
    relaxed[x] = p[x] + moved
    return relaxed


def _normal(p: Distribution) -> Distribution:
    return [v / sum(p) for v in p]


def round_distribution(
    p: Distribution, q: Distribution, tries: int, relax: Relax = no_relax, optimal: bool = False
) -> Distribution:
    """The distribution of the code a round decides after the root: `tries` children drawn from q without replacement.

    optimal: after a rejection the next code is drawn from the excess of p over q, instead of that of the relaxed p.
    """
    if tries == 0 or sum(q) == 0:
        return list(p)
    distribution = [0.0] * len(p)
    for x, chance in enumerate(q):
        if chance == 0:
            continue
        relaxed = relax(p, x)
        accept = min(1.0, relaxed[x] / chance)
        distribution[x] += chance * accept
        if accept == 1:
            continue
        left = [max(b - c, 0.0) for b, c in zip(p if optimal else relaxed, q, strict=True)]
        left = _normal(left) if sum(left) > 0 else relaxed
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
        relaxed = relax(r, x)
        distribution[x] += reach * relaxed[x]
        reach *= 1 - relaxed[x]
        left = [0.0 if y == x else b for y, b in enumerate(r if optimal else relaxed)]
        r = _normal(left) if sum(left) > 0 else relaxed
    return [a + reach * b for a, b in zip(distribution, r, strict=True)]


def drawn(q: Tensor, count: int, seed: int = 0) -> Tensor:
    """q [..., V] -> codes [..., count] drawn without replacement, in order; those of probability 0 come last."""
    noise = torch.rand(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (q / -noise.log()).topk(count, -1).indices


# Drafts of every context, enumerated. The context of level i is the i codes before it, as a number to the base V.

Contexts = list[Tensor]  # level by level, [V ** i, V]
KINDS = ["random", "near", "with zeros", "a point", "equal", "forced", "all of them"]  # of `contexts`
ChainStops = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Stops = Callable[[Tensor, Tensor, Tensor, Tree], tuple[Tensor, Tensor]]


def contexts(vocab: int, depth: int, kind: str, seed: int = 0) -> tuple[Contexts, Contexts]:
    """The distributions of a target at `depth` + 1 levels and of a drafter at `depth`, in every context.

    kind: "random"; "near", a drafter close to the target; "with zeros" in both; "a point", a drafter with all probability on one code;
    "equal"; "forced", a target with all probability on one code at every other context, and a drafter with the same at half of those;
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


@dataclass(frozen=True)
class Drafts:
    """All drafts of a tree that may be drawn, and how likely each is."""

    draft: Draft
    at: Tensor  # [D, N] the context of every node
    p: Tensor  # [D, N, V]
    chance: Tensor  # [D]


def tree_drafts(shape: Shape, p: Contexts, q: Contexts, draws: Tensor | None = None) -> Drafts:
    """Every draft of a shape, or one at random for each uniform number in draws [D, N]. A node whose q has no more codes
    repeats its first child."""
    vocab, tree = p[0].shape[-1], StaticTree(shape)
    paths = tree.paths
    kids = [[i for i, path in enumerate(paths) if path[:-1] == above and path] for above in paths]
    count = 1 if draws is None else len(draws)
    codes = torch.zeros(count, len(paths), dtype=torch.int64)
    at, chance = torch.zeros_like(codes), torch.ones(count, dtype=torch.float64)
    for node, path in enumerate(paths):
        left = None
        for kid in kids[node]:
            here = q[len(path)][at[:, node]] if left is None else left
            exhausted = here.sum(-1, keepdim=True) == 0
            first = torch.nn.functional.one_hot(codes[:, kids[node][0]], vocab).double()
            each = (here / here.sum(-1, keepdim=True)).where(~exhausted, first)
            if draws is None:
                row, code = each.nonzero(as_tuple=True)
                codes, at, chance, here = codes[row], at[row], chance[row] * each[row, code], here[row]
            else:
                code = (each.cumsum(-1) <= draws[:, kid, None]).sum(-1).clamp(max=vocab - 1)
            codes[:, kid], at[:, kid] = code, at[:, node] * vocab + code
            left = here.scatter(1, code[:, None], 0)
    ps, qs = torch.zeros(2, *codes.shape, vocab, dtype=torch.float64)
    for node, path in enumerate(paths):
        ps[:, node] = p[len(path)][at[:, node]]
        if kids[node]:
            qs[:, node] = q[len(path)][at[:, node]]
    like = tree.grow(codes[:, 0], qs[:, 0], lambda f: qs[:, f.node[0]], lambda q, n, _: q.topk(n).indices)
    return Drafts(Draft(like.tree, codes, qs), at, ps, chance)


def tree_distribution(
    stops: Stops, drafts: Drafts, distribution: Tensor, p: Contexts
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Verification of all drafts against distribution [D, N, V]: the distribution of all sequences, with the target p continuing where a draft
    ended; how often every node is accepted, [N]; and of every node the mass of each code decided after it, [contexts, V].
    """
    tree, vocab = drafts.draft.tree, distribution.shape[-1]
    rejected, left = stops(distribution, drafts.draft.probs, drafts.draft.codes, tree)
    zero, one = torch.zeros_like(rejected[:, :1]), torch.ones_like(rejected[:, :1])
    ends = torch.zeros(drafts.at.shape, dtype=torch.float64)
    ends[:, tree.layout.order] = torch.cat((zero, rejected, one), 1).diff(dim=1) * drafts.chance[:, None]
    mass = left.sum(-1, keepdim=True)
    bonus = (left / mass).where(mass > 0, 0) * ends[..., None]  # [D, N, V]
    kept = (ends[:, None] * tree.mask.transpose(1, 2)).sum(-1)  # [D, N] it, or one below it, is the last
    after, total = [], torch.zeros(1, dtype=torch.float64)
    for depth in range(len(p)):
        total = total[:, None] * p[depth]
        for node in (tree.depth[0] == depth).nonzero()[:, 0].tolist():
            total.index_add_(0, drafts.at[:, node], bonus[:, node])
        total = total.flatten()
    for node in range(drafts.at.shape[1]):
        rows = vocab ** int(tree.depth[0, node])
        found = torch.zeros(rows, vocab, dtype=torch.float64).index_add_(
            0, drafts.at[:, node], bonus[:, node]
        )
        for kid in (tree.parent[0] == node).nonzero()[:, 0].tolist():
            place = drafts.at[:, node] * vocab + drafts.draft.codes[:, kid]
            found.view(-1).index_add_(0, place, kept[:, kid])
        after.append(found)
    return total, kept.sum(0), after


def chain_distribution(stops: ChainStops, p: Contexts, q: Contexts) -> tuple[Tensor, Tensor]:
    """`tree_distribution` over all drafts of a chain: that of all sequences, and how often draft code 1, 2 .. is kept."""
    drafts = tree_drafts(chain(len(q)), p, q)
    total, kept, _ = tree_distribution(lambda p, q, codes, tree: stops(p, q, codes), drafts, drafts.p, p)
    return total, kept[1:]
