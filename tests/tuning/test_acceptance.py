"""Acceptances: counted in walks of a chain whose law is known, and guessed where nothing was counted."""

from __future__ import annotations

import pytest
import torch
from toys import MarkovTarget, OtherMarkovDrafter, admit_all, parallel

from lanternpp.accept.exact import Exact
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.proposer import Proposer
from lanternpp.engine.sampling import Sampling
from lanternpp.proposers.parallel import Parallel
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.static import StaticTree
from lanternpp.tuning.acceptance import WEIGHT, Counts
from lanternpp.tuning.probe import _Witness, probe

CHAIN = torch.tensor([[0.5, 0.3, 0.2], [0.05, 0.15, 0.8], [0.6, 0.3, 0.1]], dtype=torch.float64)
FAR = torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.2, 0.2], [0.3, 0.3, 0.4]], dtype=torch.float64)
SHAPE = ((0,), (1,), (0, 0), (1, 0))


def engine(batch: int, grid: int = 2, at_once: bool = False) -> Engine:
    target = MarkovTarget(CHAIN, grid)
    proposer: Proposer = TreeProposer(OtherMarkovDrafter(target, FAR), StaticTree(SHAPE))
    if at_once:
        proposer = Parallel(parallel(target), StaticTree(SHAPE))
    return Engine(target, proposer, Exact(), Sampling(), Guidance(), batch)


def first_two(p: torch.Tensor, q: torch.Tensor) -> tuple[float, float]:
    """How often the first child drawn from q is kept, and the second is judged and kept; by enumeration."""
    first = float(torch.minimum(p, q).sum())
    left = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
    second = 0.0
    for code in range(len(p)):
        refused = float(q[code] - torch.minimum(p, q)[code])
        rest = q.clone()
        rest[code] = 0
        second += refused * float(torch.minimum(left, rest / rest.sum()).sum())
    return first, second


def test_what_is_counted_is_what_can_be_enumerated() -> None:
    batch = 20_000
    loop = engine(batch)
    witness = _Witness(loop, [(), *SHAPE])
    admit_all(loop, torch.arange(batch))
    room = witness.room()
    loop.step()
    witness.note(room)
    rows = [first_two(CHAIN[root], FAR[root]) for root in range(3)]
    first, second = (float(CHAIN[0] @ torch.tensor([row[i] for row in rows]).double()) for i in (0, 1))
    tried, kept = witness.counts.tried, witness.counts.kept
    assert tried[0, 0] == witness.passes == batch and tried[0, 1] == batch - kept[0, 0]
    assert float(kept[0, 0]) / batch == pytest.approx(first, abs=0.015)
    assert float(kept[0, 1]) / batch == pytest.approx(second, abs=0.015)
    assert tried[1, 0] == kept[0, 0] + kept[0, 1]
    assert witness.codes == batch + kept.sum()


@pytest.mark.parametrize("at_once", [False, True])
def test_the_end_of_a_picture_is_not_counted_as_a_refusal(at_once: bool) -> None:
    loop, plain = engine(1, 3, at_once), engine(1, 3)
    drawn = probe(loop, plain, SHAPE, ["a"], [0], lambda codes: None)
    last = loop.harvest(0).accepted
    assert drawn.passes < len(last) and drawn.codes <= 9 - 1
    assert drawn.codes == drawn.passes + sum(map(sum, drawn.kept))
    assert drawn.judged == pytest.approx(sum(map(sum, drawn.tried)) / drawn.passes)
    assert min(drawn.begin, drawn.draft, drawn.look, drawn.judge, drawn.plain_step) > 0


def test_a_walk_says_which_children_were_refused() -> None:
    counts = Counts.none(3, 4)
    counts.add([(), (2,)], 1)  # two refused, the third kept, and its only child refused
    counts.add([()], 4)
    assert counts.tried.tolist() == [[2, 2, 2, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert counts.kept.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert torch.equal(
        Counts.of([([[1.0, 1.0]], [[1.0, 0.0]])] * 2, 2, 3).tried[0], torch.tensor([2.0, 2, 0])
    )


def test_many_counts_speak_for_themselves_and_few_follow_the_curve() -> None:
    depth, rank = torch.arange(6.0)[:, None], torch.arange(8.0)
    law = (1.5 - 1.2 * rank.log1p() - 0.3 * depth.log1p()).sigmoid().double()
    tried = torch.zeros(6, 8, dtype=torch.float64)
    tried[:4, :4] = 1000
    tried[0, 1] = 100_000
    kept = tried * law
    kept[0, 1] = 90_000  # an exception
    table = Counts(tried, kept).table()
    assert float(table[0, 1]) == pytest.approx(0.9, abs=1e-3)
    seen = Counts(tried.clone(), tried * law).table()
    assert seen == pytest.approx(law, abs=0.03)  # the unseen ranks and depths too
    few = Counts(tried / 1e4, tried * law / 1e4).table()
    assert (few[:, 0] > few[:, 7]).all() and WEIGHT > 1


def test_nothing_counted_is_no_trouble() -> None:
    table = Counts.none(3, 4).table()
    assert table.isfinite().all() and ((table > 0) & (table < 1)).all()
    certain = Counts(torch.full((3, 4), 500.0).double(), torch.full((3, 4), 500.0).double()).table()
    assert (certain > 0.9).all() and (certain < 1).all()
