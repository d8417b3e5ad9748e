from __future__ import annotations

import pytest
import torch
from helpers.drafts import check_tree
from helpers.refusals import rejects

from lanternpp.trees.chain import chain_tree
from lanternpp.trees.shapes import EAGLE, SHAPES, by_levels, chain
from lanternpp.trees.static import StaticTree

BATCH, VOCAB = 3, 20
UNEVEN = ((0,), (1,), (2,), (1, 0), (1, 1), (1, 1, 0), (2, 0))
EVERY = {name: SHAPES[name] for name in ("eagle-25", "lantern-57", "deep-8", "chain-4")} | {"uneven": UNEVEN}
every_shape = pytest.mark.parametrize("shape", EVERY.values(), ids=EVERY)


def recorded(shape):
    """A grown draft, the tree it came from, and every look beyond: (frontier, the q it was given)."""
    tree, looks = StaticTree(shape), []
    generator = torch.Generator().manual_seed(0)

    def extend(at):
        q = torch.rand(*at.codes.shape, VOCAB, generator=generator)
        looks.append((at, q))
        return q

    root = torch.arange(BATCH)
    q = torch.rand(BATCH, VOCAB, generator=generator)
    draft = tree.grow(root, q, extend, lambda q, count, level: q.topk(count).indices)
    return draft, tree, looks, q


@every_shape
def test_a_static_tree_is_a_tree(shape):
    check_tree(recorded(shape)[0], every=True)


@every_shape
def test_children_are_the_ones_drawn_at_their_parent_in_trial_order(shape):
    draft = recorded(shape)[0]
    for node in range(draft.codes.shape[1]):
        kids = [k for k in draft.tree.children[0, node].tolist() if k >= 0]
        expected = draft.probs[:, node].topk(len(kids)).indices if kids else torch.empty(BATCH, 0)
        assert torch.equal(draft.codes[:, kids], expected.long())


@every_shape
def test_a_node_keeps_the_distribution_its_children_were_drawn_from(shape):
    draft, _, looks, root = recorded(shape)
    assert torch.equal(draft.probs[:, 0], root)
    seen = {0}
    for at, q in looks:
        for w in range(at.node.shape[1]):
            node = int(at.node[0, w])
            assert torch.equal(draft.probs[:, node], q[:, w]) and node not in seen
            seen.add(node)
    inner = {n for n in range(draft.codes.shape[1]) if (draft.tree.children[0, n] >= 0).any()}
    assert seen == inner, "every node with children is looked beyond once, and no other"


@every_shape
def test_the_drafter_is_told_the_truth_about_the_frontier(shape):
    draft, _, looks, _ = recorded(shape)
    tree = draft.tree
    for at, _ in looks:
        assert torch.equal(at.codes, draft.codes.gather(1, at.node))
        assert torch.equal(at.parent, tree.parent.gather(1, at.node))
        assert torch.equal(at.depth, tree.depth.gather(1, at.node))
        lines = tree.mask.gather(1, at.node[..., None].expand(-1, -1, tree.mask.shape[2])).clone()
        lines[..., 0] = False  # the root is in the drafter's cache already
        assert torch.equal(at.mask, lines)


@every_shape
def test_size_depth_and_widths_are_known_beforehand(shape):
    draft, tree, _, _ = recorded(shape)
    assert tree.size == draft.codes.shape[1] == len(set(shape)) + 1
    assert tree.depth == int(draft.tree.depth.max()) == len(draft.tree.widths)
    for depth, width in enumerate(draft.tree.widths):
        kids = (draft.tree.children[0][draft.tree.depth[0] == depth] >= 0).sum(1)
        assert int(kids.max()) == width
    assert draft.codes[:, 0].tolist() == [0, 1, 2]


def test_one_tree_serves_batches_of_any_size_in_any_precision():
    tree = StaticTree(UNEVEN)
    for batch, dtype in ((1, torch.float32), (4, torch.float64), (2, torch.float32)):
        q = torch.rand(batch, VOCAB, dtype=dtype)
        draft = tree.grow(
            torch.zeros(batch, dtype=torch.int64),
            q,
            lambda at, dtype=dtype: torch.rand(*at.codes.shape, VOCAB, dtype=dtype),
            lambda q, count, level: q.topk(count).indices,
        )
        assert draft.probs.dtype == dtype and torch.equal(draft.probs[:, 0], q)
        assert draft.codes.shape == (batch, 8) and draft.tree.mask.shape == (batch, 8, 8)


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (((0,), (1, 0)), r"path \[1, 0\] has no parent; add \[1\]"),
        (((0,), (0,)), r"path \[0\] is listed twice"),
        (((0,), (-1,)), "is not a path"),
        (((0,), ()), "is not a path"),
        ((), "non-empty list of paths"),
        (chain(33), "the limits are"),
    ],
)
def test_a_shape_that_is_no_tree_is_refused(shape, names):
    rejects(names, StaticTree, shape)


def test_the_order_of_a_shapes_paths_does_not_matter():
    assert StaticTree(UNEVEN).paths == StaticTree(UNEVEN[::-1]).paths


def test_the_known_shapes_have_the_papers_sizes_and_skip_no_rank():
    levels = [len(path) for path in SHAPES["lantern-57"]]
    assert [levels.count(d) for d in range(1, 6)] == [5, 13, 16, 14, 9]
    assert len(EAGLE) == 25 and max(map(len, EAGLE)) == 5
    assert all(SHAPES[f"chain-{n}"] == tuple((0,) * d for d in range(1, n + 1)) for n in range(1, 17))
    for shape in SHAPES.values():
        assert all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in shape for path in shape)
    shape = by_levels((3, 4, 2))
    assert (0, 0, 0) in shape and (0,) * 4 not in shape and len(shape) == 9, "first children go deepest"


def test_a_chain_tree_is_the_static_tree_of_a_chain():
    made, grown = chain_tree(BATCH, 4, torch.device("cpu")), recorded(chain(4))[0].tree
    for name in ("parent", "depth", "children", "mask", "widths"):
        a, b = getattr(made, name), getattr(grown, name)
        assert a == b if name == "widths" else torch.equal(a, b), name


def test_an_empty_chain_is_the_root_alone():
    tree = chain_tree(2, 0, torch.device("cpu"))
    assert tree.parent.tolist() == [[-1], [-1]] and tree.mask.all() and tree.widths == ()
    assert (tree.children == -1).all()
