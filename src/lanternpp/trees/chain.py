"""A chain: a tree with one child per node."""

from __future__ import annotations

import torch

from lanternpp.types import Tree


def chain_tree(batch: int, depth: int, device: torch.device) -> Tree:
    """A root and `depth` descendants in a row."""
    index = torch.arange(depth + 1, device=device)

    def each(x: torch.Tensor) -> torch.Tensor:
        return x[None].expand(batch, *x.shape).contiguous()

    child = torch.where(index < depth, index + 1, -1)
    return Tree(
        each(index - 1), each(index), each(child[:, None]), each(index[:, None] >= index), (1,) * depth
    )
