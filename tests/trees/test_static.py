from __future__ import annotations

import pytest
import torch
from helpers.drafts import check_tree
from helpers.refusals import rejects

from lanternpp.trees.static import EAGLE, SHAPES, StaticTree, chain, chain_tree

BATCH, VOCAB = 3, 20
UNEVEN = ((0,), (1,), (2,), (1, 0), (1, 1), (1, 1, 0), (2, 0))
EVERY = {name: SHAPES[name] for name in ("eagle-25", "lantern-57", "deep-8", "chain-4")} | {"uneven": UNEVEN}


def grown(tree, batch=BATCH, dtype=torch.float32):
    """A draft whose children are the likeliest codes of random distributions."""
    generator = torch.Generator().manual_seed(0)

    def q_of(*shape):
        return torch.rand(*shape, VOCAB, generator=generator, dtype=dtype)

    def likeliest(q, count, level):
        return q.topk(count).indices

    return tree.grow(torch.arange(batch), q_of(batch), lambda at: q_of(*at.codes.shape), likeliest)


@pytest.mark.parametrize("shape", EVERY.values(), ids=EVERY)
def test_a_draft_is_a_tree_of_codes_drawn_at_each_node_in_trial_order(shape):
    """`proposers/test_tree_proposer.py` tests the frontier that the drafter gets."""
    tree = StaticTree(shape)
    draft = grown(tree)
    check_tree(draft, every=True)
    assert tree.size == draft.codes.shape[1] == len(set(shape)) + 1
    assert tree.depth == int(draft.tree.depth.max()) == len(draft.tree.widths)
    assert draft.codes[:, 0].tolist() == [0, 1, 2]
    most = [0] * tree.depth
    for node, depth in enumerate(draft.tree.depth[0].tolist()):
        kids = [k for k in draft.tree.children[0, node].tolist() if k >= 0]
        if kids:
            assert torch.equal(draft.codes[:, kids], draft.probs[:, node].topk(len(kids)).indices)
            most[depth] = max(most[depth], len(kids))
    assert tuple(most) == draft.tree.widths


def test_one_tree_serves_batches_of_any_size_in_any_precision():
    tree, drafts = StaticTree(UNEVEN), {}
    for batch, dtype in ((1, torch.float32), (4, torch.float64), (2, torch.float32), (1, torch.float32)):
        draft = grown(tree, batch, dtype)
        assert drafts.setdefault((batch, dtype), draft).probs is draft.probs  # where a graph reads it
        assert draft.probs.dtype == dtype and draft.probs.shape[0] == batch
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
def test_a_shape_that_is_no_tree_is_rejected(shape, names):
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


def test_an_empty_chain_is_the_root_alone():
    tree = chain_tree(2, 0, torch.device("cpu"))
    assert tree.parent.tolist() == [[-1], [-1]] and tree.mask.all() and tree.widths == ()
