"""A chain: a tree with one child per node, with alternatives of its first code."""

from __future__ import annotations

import torch

from lanternpp.types import Layout, Tree


def chain_tree(batch: int, depth: int, device: torch.device, alternatives: int = 0) -> Tree:
    """A root and `depth` descendants in a row, then further children of the root, which have none."""
    size = depth + 1 + alternatives
    index = torch.arange(size, device=device)
    inside = index <= depth

    def each(x: torch.Tensor) -> torch.Tensor:
        return x[None].expand(batch, *x.shape).contiguous()

    children = torch.full((size, 1 + alternatives), -1, device=device)
    children[:depth, 0] = index[1 : depth + 1]
    children[0, 1:] = index[depth + 1 :]
    mask = (index[:, None] >= index) & inside[:, None] & inside
    mask[depth + 1 :, 0] = True
    mask.fill_diagonal_(True)
    widths = (1 + alternatives, *(1,) * (depth - 1)) if depth else ()
    spans = tuple((slice(level, level + 1),) * width for level, width in enumerate(widths))
    order = torch.cat((index[:1], index[depth + 1 :].flip(0), index[1 : depth + 1]))
    parent, depths = (index - 1).where(inside, 0), index.where(inside, 1)
    return Tree(each(parent), each(depths), each(children), each(mask), widths, Layout(spans, order))
