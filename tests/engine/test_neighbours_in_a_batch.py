"""What a sample gets does not depend on who sits beside it, in any dtype, at a fixed batch size."""

from __future__ import annotations

import pytest
import torch
from helpers.toys import ToyTarget, codes_of, eagle, engine_of, neighbours

from lanternpp.accept.exact import Exact
from lanternpp.accept.neighbours import LanternPlusPlus
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.static import StaticTree

DTYPES = [torch.bfloat16, torch.float32]
SHAPE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
MINE = ("clouds", 11)
OTHERS = [
    [("a", 1), ("sea", 2), ("hill", 3)],
    [(None, 7), ("clouds", 11), ("stones", 5)],
    [("clouds", 12), ("b", 1 << 40), (None, 0)],
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_neither_the_neighbours_nor_the_slot_nor_entering_late_changes_anything(dtype, drafted):
    target = ToyTarget(vocab=64, grid=3).to(dtype)
    proposer = TreeProposer(eagle(target).to(dtype), StaticTree(SHAPE)) if drafted else NoDraft()
    rule = LanternPlusPlus(neighbours(target.codebook.float(), 5), 3.0) if drafted else Exact()
    engine = engine_of(target, proposer, 4, cfg=3.0, rule=rule)
    batches = [[*others[:i], MINE, *others[i:]] for i, others in enumerate([*OTHERS, OTHERS[0]])]
    batches.append([*OTHERS[0], ("stone", 9), ("bird", 4), MINE])
    drawn = {tuple(codes_of(engine, *zip(*batch, strict=True))[batch.index(MINE)]) for batch in batches}
    assert len(drawn) == 1
