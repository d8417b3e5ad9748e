"""Trees of fixed shape (EAGLE-1, LANTERN++), whose children are sampled without replacement from q.

A shape is a list of paths, a path the rank of the child at every level.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.trees.base import Children, Extend, TreeBuilder
from lanternpp.types import Draft, Frontier, Layout, Tree

Path = tuple[int, ...]
Shape = tuple[Path, ...]


def chain(depth: int) -> Shape:
    """One node per level."""
    return tuple((0,) * d for d in range(1, depth + 1))


def is_chain(shape: Shape) -> bool:
    """Whether no node of a shape has more than one child."""
    return not any(map(any, shape))


def by_levels(counts: Sequence[int], branch: int = 16) -> Shape:
    """`counts[d]` nodes at level d + 1, first children deepest.

    At every level the paths with the smallest sum of ranks are kept, earlier ranks deciding ties, among
    the children of the level above.
    """
    shape: list[Path] = []
    above: list[Path] = [()]
    for count in counts:
        offered = [(*path, rank) for path, rank in product(above, range(branch))]
        above = sorted(sorted(offered, key=lambda p: (sum(r + (r > 0) for r in p), p))[:count])
        shape += above
    return tuple(shape)


EAGLE: Shape = tuple(
    tuple(int(rank) for rank in path)
    for level in (
        "0 1 2 3",
        "00 01 02 10 11 20 21 30",
        "000 001 002 010 011 020 021 100",
        "0000 0001 0002",
        "00000 00001",
    )
    for path in level.split()
)
"""The 25-node tree of EAGLE-1 (arXiv 2401.15077, figure 7)."""

SHAPES: dict[str, Shape] = {
    "eagle-25": EAGLE,
    "lantern-57": by_levels((5, 13, 16, 14, 9)),
    "deep-8": by_levels((2, 2, 2, 1, 1)),
    **{f"chain-{n}": chain(n) for n in range(1, 17)},
}

MAX_NODES, MAX_DEPTH = 512, 32


def check(paths: object, source: str) -> Shape:
    """Paths from outside, lists or tuples, as a shape; InputError unless they form one tree of sane size."""
    if not isinstance(paths, list | tuple) or not paths:
        raise InputError(f"{source} must hold a non-empty list of paths such as [[0], [0, 0], [1]]")
    deepest = max((len(path) for path in paths if isinstance(path, list | tuple)), default=0)
    if len(paths) > MAX_NODES or deepest > MAX_DEPTH:
        raise InputError(
            f"{source}: {len(paths)} nodes, {deepest} deep; the limits are {MAX_NODES} and {MAX_DEPTH}"
        )
    shape = []
    for path in paths:
        ranks = path if isinstance(path, list | tuple) else ()
        if not ranks or not all(type(r) is int and 0 <= r < MAX_NODES for r in ranks):
            raise InputError(f"{source}: {path!r} is not a path; use a non-empty list of ranks from 0")
        shape.append(tuple(path))
    known = set(shape)
    if len(known) < len(shape):
        twice = next(p for p in shape if shape.count(p) > 1)
        raise InputError(f"{source}: path {list(twice)} is listed twice; list every path once")
    for path in shape:
        if len(path) > 1 and path[:-1] not in known:
            raise InputError(f"{source}: path {list(path)} has no parent; add {list(path[:-1])}")
    return tuple(shape)


@dataclass(frozen=True, slots=True)
class _Level:
    """The nodes at one depth that have children, and where their children go."""

    at: slice | Tensor  # [W] ids of the nodes, as an index
    frontier: Frontier  # the nodes, without codes
    pick: Tensor | None  # [C] which of the W * width drawn children are nodes; None: all, in order
    children: slice  # ids of the children
    width: int  # most children of a node


class StaticTree(TreeBuilder):
    """The shape is data: a list of paths with every path's prefix in it. InputError where it is not; `named` in its message."""

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
        kids: list[list[int]] = [[] for _ in self.paths]
        for path in self.paths[1:]:
            kids[index[path[:-1]]].append(index[path])
        tree = fixed_tree(kids, batch, device)
        unrooted = tree.mask.clone()
        unrooted[:, :, 0] = False  # the root is in the drafter's cache already
        levels = []
        for depth, width in enumerate(tree.widths):
            nodes = [i for i, path in enumerate(self.paths) if len(path) == depth and kids[i]]
            # Ids go level by level in the order of paths, so that the children of a level are in a row, parent by parent.
            made = [kid for i in nodes for kid in kids[i]]
            pick = [w * width + rank for w, i in enumerate(nodes) for rank in range(len(kids[i]))]
            run = slice(nodes[0], nodes[-1] + 1)
            at = run if nodes == [*range(run.start, run.stop)] else torch.tensor(nodes, device=device)
            drawn = None if pick == [*range(len(nodes) * width)] else torch.tensor(pick, device=device)
            node = torch.tensor(nodes, device=device).repeat(batch, 1)
            level = torch.full_like(node, depth)
            frontier = Frontier(node, node, tree.parent[:, nodes], depth, level, unrooted[:, nodes])
            levels.append(_Level(at, frontier, drawn, slice(made[0], made[-1] + 1), width))
        return tree, levels, torch.zeros(batch, self.size, q.shape[-1], dtype=q.dtype, device=device)


def fixed_tree(kids: list[list[int]], batch: int, device: torch.device) -> Tree:
    """The tree, with its `layout`, in which node i has the children kids[i]; a parent's id is below those of its children."""
    parent, depth = [-1] * len(kids), [0] * len(kids)
    mask = torch.eye(len(kids), dtype=torch.bool)
    for node, below in enumerate(kids):
        for kid in below:
            parent[kid], depth[kid] = node, depth[node] + 1
            mask[kid] |= mask[node]
    inner = [[i for i, at in enumerate(depth) if at == level and kids[i]] for level in range(max(depth))]
    widths = tuple(max(len(kids[i]) for i in nodes) for nodes in inner)
    having = [
        [[i for i in nodes if len(kids[i]) > rank] for rank in range(width)]
        for nodes, width in zip(inner, widths, strict=True)
    ]
    spans = tuple(tuple(slice(ids[0], ids[-1] + 1) for ids in level) for level in having)
    # Every node before its children, the last child first: post-order from its end.
    order, stack = [], [0]
    while stack:
        order.append(stack.pop())
        stack += kids[order[-1]]

    def each(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        one = torch.as_tensor(values, dtype=dtype, device=device)
        return one.repeat(batch, *[1] * one.dim())

    table = [k + [-1] * (max(widths, default=1) - len(k)) for k in kids]
    layout = Layout(spans, torch.tensor(order, device=device))
    return Tree(each(parent), each(depth), each(table), each(mask, torch.bool), widths, layout)
