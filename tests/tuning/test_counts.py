"""What the search for trees rests on: how often a child is kept depends on its depth and rank, and not on the tree around it."""

from __future__ import annotations

import pytest
import torch
from helpers.toys import CHAIN, MarkovTarget, OtherMarkovDrafter, admit_all

from lanternpp.accept.exact import Exact
from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import AcceptanceByRank
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.engine.verify.choose import Verifier
from lanternpp.engine.verify.joint import verify_joint
from lanternpp.engine.verify.tokenwise import verify_tokenwise
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.search import expected_codes
from lanternpp.trees.static import Shape, StaticTree

FAR = torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.2, 0.2], [0.3, 0.3, 0.4]], dtype=torch.float64)


def counted(shape: Shape, grid: int, batch: int, verifier: Verifier, whole: bool = False) -> AcceptanceByRank:
    """The counts of one step of a batch, or of whole pictures."""
    target = MarkovTarget(CHAIN, grid)
    proposer = TreeProposer(OtherMarkovDrafter(target, FAR), StaticTree(shape))
    engine = Engine(target, proposer, Exact(), Sampling(), Guidance(), batch, verifier=verifier)
    counts = AcceptanceByRank(target.length)
    engine.observers.append(counts)
    admit_all(engine, torch.arange(batch))
    engine.step()
    while whole and len(engine.done()) < batch:
        engine.step()
    return counts


@pytest.mark.parametrize("verifier", [verify_tokenwise, verify_joint])
@torch.inference_mode()
def test_counts_of_one_tree_predict_another(verifier: Verifier) -> None:
    wide = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))
    counts = counted(wide, 4, 10_000, verifier)
    table = (counts.kept / counts.tried.clamp(min=1)).double()
    for shape in (wide, ((0,), (1,)), ((0,), (0, 0), (1,))):
        measured = int(counted(shape, 4, 10_000, verifier).codes) / 10_000
        assert expected_codes(table, shape) == pytest.approx(measured, abs=0.03)


@torch.inference_mode()
def test_the_end_of_a_picture_is_not_counted_as_a_rejection() -> None:
    counts = counted(((0,), (1,), (0, 0), (1, 0)), 3, 1, verify_tokenwise, whole=True)
    assert int(counts.codes) == int(counts.passes) + int(counts.kept.sum()) <= 9 - 1
