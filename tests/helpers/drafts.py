"""Every draft of a small tree, siblings drawn without replacement, and the distribution that verifying all of them has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from helpers.distributions import Contexts
from lanternpp.trees.shapes import Shape
from lanternpp.trees.static import StaticTree
from lanternpp.types import Draft, Tree

Stops = Callable[[Tensor, Tensor, Tensor, Tree], tuple[Tensor, Tensor]]


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
            gone = here.sum(-1, keepdim=True) == 0
            first = torch.nn.functional.one_hot(codes[:, kids[node][0]], vocab).double()
            each = (here / here.sum(-1, keepdim=True)).where(~gone, first)
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
    """Verification of all drafts against distribution [D, N, V]: the distribution of all sequences, the target p going on where a draft
    ended; how often every node is kept, [N]; and of every node the mass of each code decided behind it, [contexts, V].
    """
    tree, vocab = drafts.draft.tree, distribution.shape[-1]
    behind, left = stops(distribution, drafts.draft.probs, drafts.draft.codes, tree)
    zero, one = torch.zeros_like(behind[:, :1]), torch.ones_like(behind[:, :1])
    ends = torch.zeros(drafts.at.shape, dtype=torch.float64)
    ends[:, tree.layout.order] = torch.cat((zero, behind, one), 1).diff(dim=1) * drafts.chance[:, None]
    mass = left.sum(-1, keepdim=True)
    bonus = (left / mass).where(mass > 0, 0) * ends[..., None]  # [D, N, V]
    kept = (ends[:, None] * tree.mask.transpose(1, 2)).sum(-1)  # [D, N] it, or one below it, is the last
    after, whole = [], torch.zeros(1, dtype=torch.float64)
    for depth in range(len(p)):
        whole = whole[:, None] * p[depth]
        for node in (tree.depth[0] == depth).nonzero()[:, 0].tolist():
            whole.index_add_(0, drafts.at[:, node], bonus[:, node])
        whole = whole.flatten()
    for node in range(drafts.at.shape[1]):
        rows = vocab ** int(tree.depth[0, node])
        found = torch.zeros(rows, vocab, dtype=torch.float64).index_add_(
            0, drafts.at[:, node], bonus[:, node]
        )
        for kid in (tree.parent[0] == node).nonzero()[:, 0].tolist():
            place = drafts.at[:, node] * vocab + drafts.draft.codes[:, kid]
            found.view(-1).index_add_(0, place, kept[:, kid])
        after.append(found)
    return whole, kept.sum(0), after


def check_tree(draft: Draft, every: bool = False) -> None:
    """What `Tree` promises. every: and each node is a child of its parent, which a dynamic tree may leave out."""
    tree, size = draft.tree, draft.codes.shape[1]
    for b in range(len(draft.codes)):
        parent, depth = tree.parent[b].tolist(), tree.depth[b].tolist()
        assert parent[0] == -1 and depth[0] == 0
        for i in range(1, size):
            assert 0 <= parent[i] < i and depth[i] == depth[parent[i]] + 1
            line = {i}
            while i:
                i = parent[i]
                line.add(i)
            assert set(tree.mask[b, max(line)].nonzero()[:, 0].tolist()) == line
        listed: list[int] = []
        for i in range(size):
            kids = [k for k in tree.children[b, i].tolist() if k >= 0]
            assert (
                all(parent[k] == i for k in kids)
                and len(kids) <= tree.widths[min(depth[i], len(tree.widths) - 1)]
            )
            assert not kids or depth[i] < len(tree.widths)
            codes = [int(draft.codes[b, k]) for k in kids]
            assert len(set(codes)) == len(codes), "a code is tried once at a node"
            listed += kids
        assert len(set(listed)) == len(listed) and (not every or len(listed) == size - 1)
