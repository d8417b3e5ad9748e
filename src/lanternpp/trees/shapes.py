"""Shapes of static trees: a shape is a list of paths, a path the rank of the child at every level."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

Path = tuple[int, ...]
Shape = tuple[Path, ...]


def chain(depth: int) -> Shape:
    """One guess per level."""
    return tuple((0,) * d for d in range(1, depth + 1))


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


EAGLE = tuple(
    tuple(int(rank) for rank in path)
    for path in (
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001".split()
    )
)
"""The 25-node tree of EAGLE-1 (arXiv 2401.15077, figure 7)."""

SHAPES: dict[str, Shape] = {
    "eagle-25": EAGLE,
    "lantern-57": by_levels((5, 13, 16, 14, 9)),
    **{f"chain-{n}": chain(n) for n in (2, 3, 4, 5, 6, 8)},
}
