"""The search for static trees against the enumeration of all of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.refusals import rejects

from lanternpp.trees import build_tree, shape_name
from lanternpp.trees.search import best_tree, expected_codes
from lanternpp.trees.static import EAGLE, check


def every_shape(nodes: int, ranks: int, depth: int) -> set[tuple[tuple[int, ...], ...]]:
    """All trees of `nodes` nodes, grown a node at a time."""
    shapes = {frozenset()}
    for _ in range(nodes):
        grown = set()
        for shape in shapes:
            for above in ((), *shape):
                rank = next(r for r in itertools.count() if (*above, r) not in shape)
                if rank < ranks and len(above) < depth:
                    grown.add(shape | {(*above, rank)})
        shapes = grown
    return {tuple(sorted(shape, key=lambda p: (len(p), p))) for shape in shapes}


def simulated(table: torch.Tensor, shape: tuple[tuple[int, ...], ...], above: tuple[int, ...] = ()) -> float:
    """Codes of a walk, by its definition: try the children in turn, go down where one is kept."""
    codes, alive, rank = 1.0, 1.0, 0
    while (*above, rank) in shape:
        kept = float(table[len(above), rank])
        codes += alive * kept * simulated(table, shape, (*above, rank))
        alive, rank = alive * (1 - kept), rank + 1
    return codes


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (4, 2), (6, 3), (7, 4)])
def test_the_tree_found_is_the_best_of_all(seed: int, nodes: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(4, 3, generator=generator, dtype=torch.float64)  # later ranks may be the better ones
    for count in range(1, nodes + 1):
        best, found = (
            max(simulated(table, shape) for shape in every_shape(count, 3, depth)),
            best_tree(table, count, depth),
        )
        assert len(found) == count and max(map(len, found)) <= depth
        assert check(found, "found") and expected_codes(table, found) == pytest.approx(best)


def test_children_of_probability_1_and_0() -> None:
    table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    found = best_tree(table, 4, 3)
    assert expected_codes(table, found) == pytest.approx(4) and set(found) == {
        (0,),
        (0, 0),
        (0, 1),
        (0, 1, 0),
    }
    assert best_tree(table, 3, 1) == ((0,), (1,)), "no more fit into two ranks and a level"


def test_a_shape_can_be_named_by_its_paths() -> None:
    assert set(build_tree(shape_name(EAGLE)).shape) == set(EAGLE)
    for wrong, named in (("[[0],[0,", "not valid JSON"), ("[[0, 0]]", "has no parent"), ("[]", "non-empty")):
        rejects(named, build_tree, wrong)
