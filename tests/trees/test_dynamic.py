"""Trees that follow the drafter's probabilities, and a second implementation of their shape in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.drafts import check_tree
from helpers.refusals import rejects
from helpers.toys import OracleDrafter, ToyTarget, engine_of

from lanternpp.engine.batching import generate
from lanternpp.engine.sampling import Sampling
from lanternpp.errors import InputError
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees import SHAPES, TREES, build_tree
from lanternpp.trees.dynamic import DynamicTree

TREES_HERE = {
    "eagle2": lambda: DynamicTree(3, 4, 12),
    "narrow": lambda: DynamicTree(2, 3, 5),
    "ddd, narrow": lambda: DynamicTree(2, 3, 6, 1, math.log(0.9)),
    "one wide": lambda: DynamicTree(1, 4, 4),
    "ddd": lambda: DynamicTree(3, 4, 12, 1, math.log(0.75)),
    "ddd, shallow": lambda: DynamicTree(3, 4, 12, 1, 0.0),
}


def markov_tables(count: int, vocab: int, zeros: float = 0.0) -> torch.Tensor:
    """[count, depth, V, V]: one table per depth, so that no two paths are equally likely."""
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(count, 6, vocab, vocab, dtype=torch.float64, generator=generator).pow(3)
    table[table < zeros] = 0
    table[..., 0] += 1e-3
    return table / table.sum(-1, keepdim=True)


def likeliest(q, count, level):
    return q.topk(count).indices


def grow(builder, tables):
    """A draft for every row of tables [B, depth, V, V] from root 0."""
    batch = torch.arange(len(tables))[:, None]
    return builder.grow(
        torch.zeros(len(tables), dtype=torch.int64),
        tables[:, 0, 0],
        lambda at: tables[batch, at.depth, at.codes],
        likeliest,
    )


def paths(draft, sample):
    """The paths of codes that `verify` can reach, in the order of their nodes."""
    tree, reached = draft.tree, {0: ()}
    for node in range(tree.parent.shape[1]):
        if node in reached:
            for child in tree.children[sample, node].tolist():
                if child >= 0:
                    reached[child] = (*reached[node], int(draft.codes[sample, child]))
    return [reached[i] for i in sorted(reached)][1:]


def best_paths(table, beam, depth, nodes, stop=lambda level, mass: False):
    """EAGLE-2 in plain Python."""
    offered, front = [], [((), 1.0)]
    for level in range(1, depth + 1):
        below = []
        for path, chance in front:
            row = table[len(path)][path[-1] if path else 0]
            for code in sorted(range(len(row)), key=lambda c: -row[c])[:beam]:
                below.append(((*path, code), chance * row[code]))
        offered += below
        front = sorted(below, key=lambda n: -n[1])[:beam]
        if stop(level, sum(chance for _, chance in front)):
            break
    kept = sorted(offered, key=lambda n: -n[1])[:nodes]
    return {path for path, chance in kept if chance > 0}


@pytest.mark.parametrize("zeros", [0.0, 0.1])
@pytest.mark.parametrize("name", TREES_HERE)
def test_a_dynamic_tree_is_a_tree(name, zeros):
    check_tree(grow(TREES_HERE[name](), markov_tables(40, 5, zeros)))


@pytest.mark.parametrize("zeros", [0.0, 0.1])
@pytest.mark.parametrize(
    ("beam", "depth", "nodes"), [(3, 4, 12), (2, 3, 5), (1, 4, 4), (4, 2, 20), (5, 3, 7)]
)
def test_a_dynamic_tree_has_the_likeliest_paths(beam, depth, nodes, zeros):
    tables = markov_tables(40, 5, zeros)
    draft = grow(DynamicTree(beam, depth, nodes), tables)
    for b, table in enumerate(tables.tolist()):
        found = paths(draft, b)
        assert len(set(found)) == len(found)
        assert set(found) == best_paths(table, beam, depth, nodes)


def test_growth_stops_where_the_beam_has_little_probability():
    tables = markov_tables(40, 5)
    draft = grow(DynamicTree(3, 5, 20, 2, math.log(0.6)), tables)
    depths = set()
    for b, table in enumerate(tables.tolist()):
        found = set(paths(draft, b))
        assert found == best_paths(table, 3, 5, 20, lambda level, mass: level >= 2 and mass < 0.6)
        depths.add(max(map(len, found)))
    assert len(depths) > 2, "some must stop early and others not"


def test_levels_after_the_stop_are_not_computed():
    calls = []

    def extend(at):
        calls.append(int(at.depth[0, 0]))
        return torch.full((2, 3, 8), 1 / 8)

    root, q = torch.zeros(2, dtype=torch.int64), torch.full((2, 8), 1 / 8)
    DynamicTree(3, 6, 20, 2, math.log(0.5)).grow(root, q, extend, likeliest)
    assert calls == [1]
    calls.clear()
    DynamicTree(3, 6, 20, 2, -100.0).grow(root, q, extend, likeliest)
    assert calls == [1, 2, 3, 4, 5]


def test_ties_keep_the_parents_of_nodes():
    certain = torch.zeros(2, 6, 6, 6, dtype=torch.float64)
    certain[0, ..., 3] = 1.0
    certain[1] = 1 / 6
    draft = grow(DynamicTree(4, 5, 11), certain)
    check_tree(draft)
    assert paths(draft, 0) == [(3,) * n for n in range(1, 6)]
    assert len(paths(draft, 1)) == 11


def test_greedy_decoding_accepts_the_likeliest_path_of_a_perfect_drafter():
    """With a wrong frontier the drafter's codes would be wrong."""
    target = ToyTarget()
    proposer = TreeProposer(OracleDrafter(target), DynamicTree(1, 4, 4))
    engine = engine_of(target, proposer, 4, Sampling(0), 3.0)
    for sample in generate(engine, ["a", "sea", None, "hill"], [3, 1, 4, 1 << 40]):
        assert sample.accepted == [1, 5, 5, 5]


def test_trees_have_names_and_their_numbers_are_checked():
    for name in TREES.keys() - SHAPES:
        builder = build_tree(name)
        assert (builder.size, builder.beam) == (59 if name == "eagle2-58" else 60, 10)
    rejects("2 nodes cannot reach depth 3; use 3 or more", DynamicTree, beam=1, depth=3, nodes=2)
    for wrong in ((0, 5, 59), (10, 0, 59), (10, 1, 11), (10, 5, 0), (2, 4, 2)):
        with pytest.raises(InputError):
            DynamicTree(*wrong)
    with pytest.raises(InputError):
        DynamicTree(start=0)
    rejects("needs as many codes", grow, DynamicTree(6, 2, 12), markov_tables(1, 5))
