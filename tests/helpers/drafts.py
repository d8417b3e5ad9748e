"""A check of a draft's tree."""

from __future__ import annotations

from lanternpp.types import Draft


def check_tree(draft: Draft, every: bool = False) -> None:
    """Check the invariants of `Tree`; every: also that each node is a child of its parent, which a dynamic tree may leave out."""
    tree, size = draft.tree, draft.codes.shape[1]
    for b in range(len(draft.codes)):
        parent, depth = tree.parent[b].tolist(), tree.depth[b].tolist()
        assert parent[0] == -1 and depth[0] == 0
        for i in range(1, size):
            assert 0 <= parent[i] < i and depth[i] == depth[parent[i]] + 1
            path = {i}
            while i:
                i = parent[i]
                path.add(i)
            assert set(tree.mask[b, max(path)].nonzero()[:, 0].tolist()) == path
        listed: list[int] = []
        for i in range(size):
            kids = [k for k in tree.children[b, i].tolist() if k >= 0]
            assert all(parent[k] == i for k in kids)
            assert len(kids) <= tree.widths[min(depth[i], len(tree.widths) - 1)]
            assert not kids or depth[i] < len(tree.widths)
            codes = [int(draft.codes[b, k]) for k in kids]
            assert len(set(codes)) == len(codes), "a code is tried once at a node"
            listed += kids
        assert len(set(listed)) == len(listed) and (not every or len(listed) == size - 1)
