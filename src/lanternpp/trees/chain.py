"""A chain: a tree with one child per node, with alternatives of its first code."""

from __future__ import annotations

import torch

from lanternpp.trees.base import TreeBuilder
from lanternpp.trees.static import StaticTree, fixed_tree
from lanternpp.types import Tree


def chain_tree(batch: int, depth: int, device: torch.device, alternatives: int = 0) -> Tree:
    """Return a root with `depth` descendants in a chain, then `alternatives` further children of the root, leaves."""
    children: list[list[int]] = [[node + 1] for node in range(depth)] + [[] for _ in range(1 + alternatives)]
    children[0] += range(depth + 1, depth + 1 + alternatives)
    return fixed_tree(children, batch, device)


def is_drawn_chain(tree: TreeBuilder) -> bool:
    """Return whether drafts are chains of a fixed length that `StaticTree.grow` draws, without a `grow` of the caller's."""
    return tree.chain and tree.drawn and type(tree).grow is StaticTree.grow
