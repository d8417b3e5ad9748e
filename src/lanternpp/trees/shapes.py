"""Shapes of static trees: a shape is a list of paths, a path the rank of the child at every level."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from lanternpp.errors import InputError

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
