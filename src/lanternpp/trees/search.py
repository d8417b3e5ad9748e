"""The static tree that keeps the most codes per pass, given how often children are kept (Sequoia, arXiv 2402.12374).

An acceptance table [D, K] has, for accepted nodes at depth d, the share of their children of rank r that are accepted once
the children of lower rank were rejected. So the probability that a node is accepted does not depend on the other nodes of the
tree, and a pass decides one code more than the number of accepted nodes. Sequoia's section 3.2 finds the best tree for one
row of acceptances; here each depth has its own row.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from lanternpp.trees.static import Path, Shape

NEVER = float("-inf")


def best_tree(table: Tensor, nodes: int, depth: int) -> Shape:
    """Return the best tree of at most `depth` levels with `nodes` nodes below the root, or as many as fit; table [D, K] in [0, 1].

    From the deepest level up, m nodes are shared between a child's subtree and its later siblings:

        worth(d, r, m) = max over j of a (1 + worth(d + 1, 0, j - 1)) + (1 - a) worth(d, r + 1, m - j), where a
        is the child's acceptance and j, at least 1, the size of its subtree with itself.
    """
    no_nodes = torch.full((nodes + 1,), NEVER, dtype=torch.float64)  # the worth where m can only be 0
    no_nodes[0] = 0
    j = torch.arange(1, nodes + 1)[None]
    remaining = torch.arange(nodes + 1)[:, None] - j  # m - j, [M + 1, M]
    below = no_nodes  # worth(d + 1, 0, m), [M + 1]
    sizes: list[list[Tensor]] = []  # by depth and rank: the best j for every m, [M + 1]
    for row in reversed(table[:depth].tolist()):
        later = no_nodes  # worth(d, r + 1, m), [M + 1]
        level_sizes: list[Tensor] = []
        for acceptance in reversed(row):
            subtree = (acceptance * (1 + below)).where(below > NEVER, NEVER)  # 0 x -inf is NaN
            siblings = ((1 - acceptance) * later).where(later > NEVER, NEVER)
            worth = subtree[j - 1] + siblings[remaining.clamp(min=0)].where(remaining >= 0, NEVER)
            best, best_index = worth.max(1)
            later = torch.cat((no_nodes[:1], best[1:]))
            level_sizes.insert(0, best_index + 1)
        below = later
        sizes.insert(0, level_sizes)

    def paths(parent: Path, m: int) -> Iterator[Path]:
        rank = 0
        while m:
            size = int(sizes[len(parent)][rank][m])
            yield (*parent, rank)
            yield from paths((*parent, rank), size - 1)
            m, rank = m - size, rank + 1

    max_nodes = int((below > NEVER).nonzero().max())
    return tuple(sorted(paths((), max_nodes), key=lambda path: (len(path), path)))


def expected_codes(table: Tensor, shape: Shape) -> float:
    """Return the expected codes per pass of a shape: its accepted nodes, and the code drawn after them; table [D, K]."""
    rows = table.tolist()
    accepted: dict[Path, float] = {(): 1.0}  # the probability of each node
    for path in sorted(shape, key=len):
        row, rank = rows[len(path) - 1], path[-1]
        # A child is tried where all earlier siblings were rejected.
        tried = prod(1 - acceptance for acceptance in row[:rank])
        accepted[path] = accepted[path[:-1]] * (row[rank] * tried)
    return sum(accepted.values())
