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

from lanternpp.errors import InputError
from lanternpp.trees.static import MAX_DEPTH, MAX_NODES, Path, Shape

NEVER = float("-inf")


class Search:
    """The best trees of up to `nodes` nodes below the root and at most `depth` levels.

    table [D, K] in [0, 1]. Raises InputError where it is no such table, or where a limit is out of range.
    """

    def __init__(self, table: Tensor, nodes: int, depth: int | None = None):
        self.table = check_table(table)
        self.nodes, self.depth = nodes, len(table) if depth is None else depth
        if not 1 <= nodes <= MAX_NODES or not 1 <= self.depth <= min(MAX_DEPTH, len(table)):
            raise InputError(
                f"{nodes} nodes, {self.depth} deep; use 1 to {MAX_NODES} nodes and a depth of 1 to "
                f"{min(MAX_DEPTH, len(table))}"
            )
        self._worth: list[Tensor] = []  # by depth: of m nodes below a node there, [M + 1]
        self._pick: list[Tensor] = []  # by depth: nodes of the subtree at rank r when m are left, [K, M + 1]
        self._solve()

    def _solve(self) -> None:
        """From the deepest level up: m nodes are shared between a child's subtree and its later siblings.

        worth(d, r, m) = max over j of a (1 + worth(d + 1, 0, j - 1)) + (1 - a) worth(d, r + 1, m - j), where a
        is the child's acceptance and j, at least 1, the size of its subtree with itself.
        """
        most = self.nodes
        none = torch.full((most + 1,), NEVER, dtype=torch.float64)
        none[0] = 0
        total, own = torch.arange(most + 1)[:, None], torch.arange(1, most + 1)[None]
        left = total - own  # [M + 1, M]
        below = none
        for depth in reversed(range(self.depth)):
            later = none
            picks: list[Tensor] = []
            for rank in reversed(range(self.table.shape[1])):
                kept = float(self.table[depth, rank])
                mine = (kept * (1 + below)).where(below > NEVER, NEVER)  # 0 x -inf is NaN
                rest = ((1 - kept) * later).where(later > NEVER, NEVER)
                worth = mine[own - 1] + rest[left.clamp(min=0)].where(left >= 0, NEVER)
                best, pick = worth.max(1)
                later = torch.cat((none[:1], best[1:]))
                picks.insert(0, pick + 1)
            below = later
            self._worth.insert(0, below)
            self._pick.insert(0, torch.stack(picks))

    def codes(self, nodes: int) -> float:
        """The expected codes per pass of the best tree with exactly so many nodes; 0 where there is none."""
        worth = float(self._worth[0][nodes])
        return 1 + worth if worth > NEVER else 0.0

    def shape(self, nodes: int) -> Shape:
        """That tree. Raises InputError where none has so many nodes within the limits."""
        if not 1 <= nodes <= self.nodes or not self.codes(nodes):
            raise InputError(
                f"no tree of {nodes} nodes fits {self.table.shape[1]} ranks and {self.depth} levels"
            )
        return tuple(sorted(self._paths((), nodes), key=lambda path: (len(path), path)))

    def _paths(self, above: Path, nodes: int) -> Iterator[Path]:
        rank = 0
        while nodes:
            own = int(self._pick[len(above)][rank, nodes])
            yield (*above, rank)
            yield from self._paths((*above, rank), own - 1)
            nodes, rank = nodes - own, rank + 1


def check_table(table: Tensor) -> Tensor:
    """An acceptance table as float64. Raises InputError unless it is [D, K] of probabilities."""
    if table.dim() != 2 or not table.numel() or not ((table >= 0) & (table <= 1)).all():
        raise InputError(f"an acceptance table of shape {list(table.shape)} is not [depth, rank] of 0 to 1")
    return table.double()


def expected(table: Tensor, shape: Shape) -> float:
    """Expected codes per pass of a shape: the nodes it keeps, and the code drawn after them."""
    rows = table.tolist()
    # The child of a rank is kept where no earlier one was.
    steps = [[row[rank] * prod(1 - kept for kept in row[:rank]) for rank in range(len(row))] for row in rows]
    reached: dict[Path, float] = {(): 1.0}
    for path in sorted(shape, key=len):
        reached[path] = reached[path[:-1]] * steps[len(path) - 1][path[-1]]
    return sum(reached.values())
