"""A tree of fixed shape (EAGLE-1, LANTERN++), whose children are sampled without replacement from q."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lanternpp.trees.base import Children, Extend, TreeBuilder
from lanternpp.trees.shapes import check
from lanternpp.types import Draft, Frontier, Layout, Tree


@dataclass(frozen=True, slots=True)
class _Level:
    """The nodes at one depth that have children, and where their children go."""

    at: slice | Tensor  # [W] ids of the nodes, as an index
    frontier: Frontier  # the nodes, without codes
    pick: Tensor | None  # [C] which of the W * width drawn children are nodes; None: all, in order
    children: slice  # ids of the children
    width: int  # most children of a node


class StaticTree(TreeBuilder):
    """The shape is data: a list of paths with every path's prefix in it. InputError, which names the shape, where it is another."""

    drawn = fixed = True

    def __init__(self, shape: Any, named: str = "a tree's shape"):
        self.shape = check(shape, named)
        paths: list[tuple[int, ...]] = [(), *sorted(self.shape, key=lambda p: (len(p), p))]
        self.paths = paths
        self.size = self.scratch = len(paths)
        self.depth = len(paths[-1])
        self.chain = self.depth == len(self.shape)
        kids = Counter(path[:-1] for path in self.shape)
        self.draws = max(Counter(map(len, kids)).values()), max(kids.values())
        self._ready: tuple[Tree, list[_Level], Tensor] | None = None

    def grow(self, root: Tensor, q: Tensor, extend: Extend, children: Children) -> Draft:
        """root [B], or [B, C] of latents, q [B, V] -> a draft; the drafter expands the inner nodes of a level in one pass."""
        tree, levels, probs = self._constants(root, q)
        codes = root[:, None].repeat(1, self.size, *[1] * (root.dim() - 1))
        level_q = q[:, None]
        for depth, level in enumerate(levels):
            if depth:
                level_q = extend(replace(level.frontier, codes=codes[:, level.at]))
            probs[:, level.at] = level_q
            drawn = children(level_q, level.width, depth).flatten(1, 2)
            codes[:, level.children] = drawn if level.pick is None else drawn[:, level.pick]
        return Draft(tree, codes, probs)

    def _constants(self, root: Tensor, q: Tensor) -> tuple[Tree, list[_Level], Tensor]:
        """Index tensors for this batch size and device, made once, and the buffer of node distributions."""
        probs = self._ready[2] if self._ready else q
        if self._ready is None or (*probs.shape[::2], probs.dtype) != (len(root), q.shape[-1], q.dtype):
            self._ready = self._build(len(root), q)
        return self._ready

    def _build(self, batch: int, q: Tensor) -> tuple[Tree, list[_Level], Tensor]:
        device = q.device
        index = {path: i for i, path in enumerate(self.paths)}
        parent = [-1] + [index[p[:-1]] for p in self.paths[1:]]
        depth = [len(p) for p in self.paths]
        kids: list[list[int]] = [[] for _ in self.paths]
        for path in self.paths[1:]:
            kids[index[path[:-1]]].append(index[path])
        mask = torch.eye(self.size, dtype=torch.bool)
        for i in range(1, self.size):
            mask[i] |= mask[parent[i]]
        unrooted = mask.clone()
        unrooted[:, 0] = False  # the root is in the drafter's cache already
        inner = [[i for i in range(self.size) if depth[i] == d and kids[i]] for d in range(self.depth)]
        widths = tuple(max(len(kids[i]) for i in nodes) for nodes in inner)

        def each(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
            one = torch.as_tensor(values, dtype=dtype, device=device)
            return one[None].expand(batch, *one.shape).contiguous()

        table = [k + [-1] * (max(widths) - len(k)) for k in kids]
        layout = Layout(_spans(inner, kids, widths), torch.tensor(_preorder(kids), device=device))
        tree = Tree(each(parent), each(depth), each(table), each(mask, torch.bool), widths, layout)
        levels = []
        for d, nodes in enumerate(inner):
            made = [kid for i in nodes for kid in kids[i]]
            slot = {
                kid: w * widths[d] + rank for w, i in enumerate(nodes) for rank, kid in enumerate(kids[i])
            }
            first, pick = min(made), [slot[kid] for kid in sorted(made)]
            run = slice(nodes[0], nodes[-1] + 1)
            at = run if nodes == [*range(run.start, run.stop)] else torch.tensor(nodes, device=device)
            drawn = None if pick == [*range(len(nodes) * widths[d])] else torch.tensor(pick, device=device)
            node, above = each(nodes), each([parent[i] for i in nodes])
            seen = each(unrooted[nodes], torch.bool)
            frontier = Frontier(node, node, above, d, torch.full_like(node, d), seen)
            levels.append(_Level(at, frontier, drawn, slice(first, first + len(made)), widths[d]))
        return tree, levels, torch.zeros(batch, self.size, q.shape[-1], dtype=q.dtype, device=device)


def _spans(
    inner: list[list[int]], kids: list[list[int]], widths: tuple[int, ...]
) -> tuple[tuple[slice, ...], ...]:
    """`Layout.spans`, of the nodes with children at every depth and the children of every node."""
    having = [
        [[i for i in at if len(kids[i]) > rank] for rank in range(w)]
        for at, w in zip(inner, widths, strict=True)
    ]
    return tuple(tuple(slice(ids[0], ids[-1] + 1) for ids in level) for level in having)


def _preorder(kids: list[list[int]]) -> list[int]:
    """Every node before its children, the last child first: post-order from its end."""
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += kids[node]
    return order
