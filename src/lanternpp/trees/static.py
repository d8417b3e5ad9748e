"""Trees of fixed shape (EAGLE-1, LANTERN++), whose children are sampled without replacement from q.

A shape is a list of paths, a path the rank of the child at every level.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.trees.base import Children, Extend, TreeBuilder
from lanternpp.types import Draft, Frontier, Layout, Tree

Path = tuple[int, ...]
Shape = tuple[Path, ...]


def chain(depth: int) -> Shape:
    """Return the shape with one node per level."""
    return tuple((0,) * d for d in range(1, depth + 1))


def is_chain(shape: Shape) -> bool:
    """Return whether no node of a shape has more than one child."""
    return not any(map(any, shape))


def parsed(paths: str) -> Shape:
    """Return the shape of paths separated by spaces, each rank a digit."""
    return tuple(tuple(map(int, path)) for path in paths.split())


EAGLE = parsed("0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001")
"""The 25-node tree of EAGLE-1 (arXiv 2401.15077, figure 7)."""

# Of as many nodes at every level as LANTERN++ has: the paths with the smallest sum of ranks, each rank above 0 counted as one more.
LANTERN = parsed(
    "0 1 2 3 4 00 01 02 03 04 05 10 11 12 20 21 30 40 000 001 002 003 004 010 011 012 020 021 030 100 101 110 200 300 "
    "0000 0001 0002 0003 0010 0011 0020 0030 0100 0101 0110 0200 1000 2000 "
    "00000 00001 00002 00010 00020 00100 00200 01000 10000"
)

SHAPES: dict[str, Shape] = {
    "eagle-25": EAGLE,
    "lantern-57": LANTERN,
    "deep-8": parsed("0 1 00 01 000 001 0000 00000"),
    **{f"chain-{n}": chain(n) for n in range(1, 17)},
}

MAX_NODES, MAX_DEPTH = 512, 32


def check(paths: object, source: str) -> Shape:
    """Return the shape of a caller's paths, lists or tuples; raise InputError unless they form one tree of a legal size."""
    if not isinstance(paths, list | tuple) or not paths:
        raise InputError(f"{source} must hold a non-empty list of paths such as [[0], [0, 0], [1]]")
    for path in paths:
        ranks = path if isinstance(path, list | tuple) else ()
        if not ranks or not all(type(rank) is int and 0 <= rank < MAX_NODES for rank in ranks):
            raise InputError(f"{source}: {path!r} is not a path; use a non-empty list of ranks from 0")
    shape, deepest = tuple(map(tuple, paths)), max(map(len, paths))
    if len(shape) > MAX_NODES or deepest > MAX_DEPTH:
        raise InputError(
            f"{source}: {len(shape)} nodes, {deepest} deep; the limits are {MAX_NODES} and {MAX_DEPTH}"
        )
    for path, times in Counter(shape).items():
        if times > 1:
            raise InputError(f"{source}: path {list(path)} is listed twice; list every path once")
        if len(path) > 1 and path[:-1] not in shape:
            raise InputError(f"{source}: path {list(path)} has no parent; add {list(path[:-1])}")
    return shape


@dataclass(frozen=True, slots=True)
class _Level:
    """The W nodes at one depth that have children, and their C children."""

    nodes: slice | Tensor  # [W] ids of the nodes
    frontier: Frontier  # the nodes, with ids in the place of codes
    drawn: slice | Tensor  # [C] which of the W * width drawn codes the children get
    children: slice  # [C] ids of the children
    width: int  # the maximum number of children of a node


class StaticTree(TreeBuilder):
    """Drafts of one shape: a list of paths with every path's prefix in it. Raises InputError, with `source`, if it is not."""

    drawn = fixed = True

    def __init__(self, shape: Any, source: str = "a tree's shape"):
        self.shape = check(shape, source)
        self.paths: list[Path] = [(), *sorted(self.shape, key=lambda path: (len(path), path))]  # by node id
        self.size = self.scratch = len(self.paths)
        self.depth = len(self.paths[-1])
        self.chain = self.depth == len(self.shape)
        num_children = Counter(path[:-1] for path in self.shape)
        parents_by_depth = Counter(len(path) for path in num_children)
        self.draws = max(parents_by_depth.values()), max(num_children.values())
        self._constants: dict[Any, tuple[Tree, list[_Level], Tensor]] = {}  # of all engines, for their graphs

    def grow(self, root: Tensor, q: Tensor, extend: Extend, children: Children) -> Draft:
        """Grow a draft from root [B], or [B, C] of latents, and q [B, V]; the drafter expands a level's inner nodes in one pass."""
        key = len(root), q.shape[-1], q.dtype, q.device
        if key not in self._constants:
            self._constants[key] = self._build(len(root), q)
        tree, levels, probs = self._constants[key]
        codes = root[:, None].repeat(1, self.size, *[1] * (root.dim() - 1))  # [B, N] or [B, N, C]
        level_q = q[:, None]  # [B, W, V]
        for depth, level in enumerate(levels):
            if depth:
                level_q = extend(replace(level.frontier, codes=codes[:, level.nodes]))
            probs[:, level.nodes] = level_q
            drawn = children(level_q, level.width, depth).flatten(1, 2)  # [B, W width]
            codes[:, level.children] = drawn[:, level.drawn]
        return Draft(tree, codes, probs)

    def _build(self, batch: int, q: Tensor) -> tuple[Tree, list[_Level], Tensor]:
        """Return the tree, its levels, and the buffer of node distributions, for this batch size, vocabulary, dtype and device."""
        device = q.device
        ids = {path: node for node, path in enumerate(self.paths)}
        children: list[list[int]] = [[] for _ in self.paths]
        for path in self.paths[1:]:
            children[ids[path[:-1]]].append(ids[path])
        tree = fixed_tree(children, batch, device)
        mask = tree.mask.clone()
        mask[:, :, 0] = False  # the root is in the drafter's cache already
        levels = []
        for depth, width in enumerate(tree.widths):
            nodes = [node for node, path in enumerate(self.paths) if len(path) == depth and children[node]]
            drawn: list[int] = []  # node w of the level draws codes w * width, w * width + 1 ..
            for w, node in enumerate(nodes):
                drawn += range(w * width, w * width + len(children[node]))
            # Ids go level by level in the order of paths, so that the children of a level are consecutive.
            child_ids = slice(children[nodes[0]][0], children[nodes[-1]][-1] + 1)
            node_ids = torch.tensor(nodes, device=device).repeat(batch, 1)  # [B, W]
            depths = torch.full_like(node_ids, depth)
            frontier = Frontier(node_ids, node_ids, tree.parent[:, nodes], depth, depths, mask[:, nodes])
            levels.append(_Level(_index(nodes, device), frontier, _index(drawn, device), child_ids, width))
        return tree, levels, torch.zeros(batch, self.size, q.shape[-1], dtype=q.dtype, device=device)


def _index(ids: list[int], device: torch.device) -> slice | Tensor:
    """Return an index of these ids: a slice where they are consecutive, which needs no copy."""
    span = range(ids[0], ids[-1] + 1)
    return slice(span.start, span.stop) if ids == [*span] else torch.tensor(ids, device=device)


def fixed_tree(children: list[list[int]], batch: int, device: torch.device) -> Tree:
    """Return the tree, with its `layout`, in which node i has children[i]; a parent's id is below its children's ids."""
    parent, depth = [-1] * len(children), [0] * len(children)
    mask = torch.eye(len(children), dtype=torch.bool)
    for node, child_ids in enumerate(children):
        for child in child_ids:
            parent[child], depth[child] = node, depth[node] + 1
            mask[child] |= mask[node]
    widths, spans = [], []
    for level in range(max(depth)):
        nodes = [node for node in range(len(children)) if depth[node] == level]
        widths.append(max(len(children[node]) for node in nodes))
        level_spans = []
        for rank in range(widths[-1]):
            parents = [node for node in nodes if len(children[node]) > rank]
            level_spans.append(slice(parents[0], parents[-1] + 1))
        spans.append(tuple(level_spans))
    # Every node before its children, the last child first: the reverse of post-order.
    order, stack = [], [0]
    while stack:
        order.append(stack.pop())
        stack += children[order[-1]]

    def batched(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        sample = torch.as_tensor(values, dtype=dtype, device=device)
        return sample.repeat(batch, *[1] * sample.dim())

    table = batched([ids + [-1] * (max(widths, default=1) - len(ids)) for ids in children])  # [B, N, K]
    layout = Layout(tuple(spans), torch.tensor(order, device=device))
    return Tree(batched(parent), batched(depth), table, batched(mask, torch.bool), tuple(widths), layout)


def chain_tree(batch: int, depth: int, device: torch.device, alternatives: int = 0) -> Tree:
    """Return a root with `depth` descendants in a chain, then `alternatives` further children of the root, leaves."""
    children: list[list[int]] = [[node + 1] for node in range(depth)] + [[] for _ in range(1 + alternatives)]
    children[0] += range(depth + 1, depth + 1 + alternatives)
    return fixed_tree(children, batch, device)


def is_drawn_chain(tree: TreeBuilder) -> bool:
    """Return whether drafts are chains of a fixed length that `StaticTree.grow` draws, without a `grow` of the caller's."""
    return tree.chain and tree.drawn and type(tree).grow is StaticTree.grow
