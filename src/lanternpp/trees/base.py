"""The base class of tree builders, which decide the shape of a draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from lanternpp.types import Draft, Frontier

Extend = Callable[[Frontier], Tensor]  # W nodes -> the distributions of their children, [B, W, V]
Children = Callable[[Tensor, int, int], Tensor]
"""(q [B, W, V], count, level) -> codes [B, W, count]: drawn from q in trial order, or the likeliest where `TreeBuilder.drawn` is False."""


class TreeBuilder(ABC):
    """A way to grow a draft from its root. `size`, `depth` and `scratch` are known before the first step."""

    size: int  # N, the root included
    depth: int  # levels below the root
    scratch: int  # cache slots the drafter needs for the nodes it expands
    drawn: bool = False  # whether children are sampled from q without replacement, in trial order
    chain: bool = False  # whether no node has more than one child
    # the maximum number of nodes of a level that have children, and of children of a node
    draws: tuple[int, int] = (1, 1)
    fixed: bool = False  # whether every draft has the same shape, which `Tree.layout` then describes

    @abstractmethod
    def grow(self, root: Tensor, q: Tensor, extend: Extend, children: Children) -> Draft:
        """Grow a draft of `size` nodes from root [B] and the distribution of its children, q [B, V]."""
