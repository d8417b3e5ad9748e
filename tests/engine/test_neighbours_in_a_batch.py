"""What a sample gets does not depend on who sits beside it, in any dtype, at a fixed batch size."""

from __future__ import annotations

import pytest
import torch
from helpers.toys import ToyTarget, eagle, neighbours

from lanternpp.accept.exact import Exact
from lanternpp.accept.neighbours import LanternPlusPlus
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
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


def codes(engine, samples):
    return [h.codes.tolist() for h in generate(engine, [c for c, _ in samples], [s for _, s in samples])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_neither_the_neighbours_nor_the_slot_nor_entering_late_changes_anything(dtype, drafted):
    target = ToyTarget(vocab=64, grid=3).to(dtype)
    proposer = TreeProposer(eagle(target).to(dtype), StaticTree(SHAPE)) if drafted else NoDraft()
    rule = LanternPlusPlus(neighbours(target.codebook.float(), 5), 3.0) if drafted else Exact()
    engine = Engine(target, proposer, rule, Sampling(), Guidance(3.0), 4)
    drawn = {
        tuple(codes(engine, [*others[:i], MINE, *others[i:]])[i])
        for i, others in enumerate([*OTHERS, OTHERS[0]])
    }
    others = OTHERS[0]
    drawn.add(tuple(codes(engine, [*others, ("stone", 9), ("bird", 4), MINE])[-1]))
    assert len(drawn) == 1
