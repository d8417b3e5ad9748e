"""The static tree that keeps the most codes per pass, given how often children are kept (Sequoia, arXiv 2402.12374).

An acceptance table [D, K] has, for a node at depth d that is accepted, the share of its children of rank r that are
accepted once those of lower rank were rejected. The probability that a node is reached then does not depend on the other
nodes of the tree, and a pass decides one code more than the number of nodes it reaches. Sequoia's section 3.2 finds the best
tree for one row of acceptances; here each depth has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from lanternpp.trees.static import Path, Shape

NEVER = float("-inf")


def best_tree(table: Tensor, nodes: int, depth: int) -> Shape:
    """The best tree of at most `depth` levels with `nodes` nodes below the root, or as many as fit; table [D, K] in [0, 1].

    From the deepest level up, m nodes are shared between a child's subtree and its later siblings:

        worth(d, r, m) = max over j of a (1 + worth(d + 1, 0, j - 1)) + (1 - a) worth(d, r + 1, m - j), where a
        is the child's acceptance and j, at least 1, the size of its subtree with itself.
    """
    none = torch.full((nodes + 1,), NEVER, dtype=torch.float64)
    none[0] = 0
    total, own = torch.arange(nodes + 1)[:, None], torch.arange(1, nodes + 1)[None]
    left = total - own  # [M + 1, M]
    below = none  # what m nodes below a node are worth, [M + 1]
    picks: list[list[Tensor]] = []  # by depth and rank: nodes of the subtree when m are left, [M + 1]
    for row in reversed(table[:depth].tolist()):
        later = none
        chosen: list[Tensor] = []
        for kept in reversed(row):
            mine = (kept * (1 + below)).where(below > NEVER, NEVER)  # 0 x -inf is NaN
            rest = ((1 - kept) * later).where(later > NEVER, NEVER)
            worth = mine[own - 1] + rest[left.clamp(min=0)].where(left >= 0, NEVER)
            best, pick = worth.max(1)
            later = torch.cat((none[:1], best[1:]))
            chosen.insert(0, pick + 1)
        below = later
        picks.insert(0, chosen)

    def paths(above: Path, left: int) -> Iterator[Path]:
        rank = 0
        while left:
            own = int(picks[len(above)][rank][left])
            yield (*above, rank)
            yield from paths((*above, rank), own - 1)
            left, rank = left - own, rank + 1

    found = paths((), int((below > NEVER).nonzero().max()))
    return tuple(sorted(found, key=lambda path: (len(path), path)))


def expected(table: Tensor, shape: Shape) -> float:
    """Expected codes per pass of a shape: the nodes it keeps, and the code drawn after them."""
    rows = table.tolist()
    # The child of a rank is kept where no earlier one was.
    steps = [[row[rank] * prod(1 - kept for kept in row[:rank]) for rank in range(len(row))] for row in rows]
    reached: dict[Path, float] = {(): 1.0}
    for path in sorted(shape, key=len):
        reached[path] = reached[path[:-1]] * steps[len(path) - 1][path[-1]]
    return sum(reached.values())
