"""Acceptances: counted in walks of a chain whose law is known, and guessed where nothing was counted."""

from __future__ import annotations

import pytest
import torch
from helpers.toys import MarkovTarget, OtherMarkovDrafter, admit_all, parallel

from lanternpp.accept.exact import Exact
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.observers import AcceptanceByRank
from lanternpp.engine.proposer import Proposer
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.choose import Verifier
from lanternpp.engine.verify.joint import verify_joint
from lanternpp.engine.verify.tokenwise import verify_tokenwise
from lanternpp.proposers.parallel import Parallel
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.search import expected
from lanternpp.trees.shapes import chain
from lanternpp.trees.static import StaticTree
from lanternpp.tuning.acceptance import WEIGHT, Counts, CutChains, CutCounts
from lanternpp.tuning.probe import probe

CHAIN = torch.tensor([[0.5, 0.3, 0.2], [0.05, 0.15, 0.8], [0.6, 0.3, 0.1]], dtype=torch.float64)
FAR = torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.2, 0.2], [0.3, 0.3, 0.4]], dtype=torch.float64)
FLAT = torch.tensor([[0.4, 0.3, 0.3], [0.3, 0.4, 0.3], [0.3, 0.3, 0.4]], dtype=torch.float64)
SHAPE = ((0,), (1,), (0, 0), (1, 0))


def engine(batch: int, grid: int = 2, at_once: bool = False) -> Engine:
    target = MarkovTarget(CHAIN, grid)
    proposer: Proposer = TreeProposer(OtherMarkovDrafter(target, FAR), StaticTree(SHAPE))
    if at_once:
        proposer = Parallel(parallel(target), StaticTree(SHAPE))
    return Engine(target, proposer, Exact(), Sampling(), Guidance(), batch)


@pytest.mark.parametrize("at_once", [False, True])
def test_the_end_of_a_picture_is_not_counted_as_a_refusal(at_once: bool) -> None:
    loop, plain = engine(1, 3, at_once), engine(1, 3)
    drawn = probe(loop, plain, SHAPE, ["a"], [0], lambda codes: None)
    last = loop.collect(0).accepted
    assert drawn.passes < len(last) and drawn.codes <= 9 - 1
    assert drawn.codes == drawn.passes + sum(map(sum, drawn.kept))
    assert drawn.judged == pytest.approx(sum(map(sum, drawn.tried)) / drawn.passes)
    assert min(drawn.begin, drawn.draft, drawn.look, drawn.judge, drawn.plain_step) > 0


def test_countings_of_any_size_add_up() -> None:
    small, large = ([[1.0, 1.0]], [[1.0, 0.0]]), ([[2.0, 0, 1], [1, 1, 0]], [[0.0, 0, 1], [1, 0, 0]])
    whole = Counts.of([small, large], 3, 4)
    assert whole.tried.tolist() == [[3, 1, 1, 0], [1, 1, 0, 0], [0] * 4]
    assert whole.kept.tolist() == [[1, 0, 1, 0], [1, 0, 0, 0], [0] * 4]


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
    table = Counts.of([], 3, 4).table()
    assert table.isfinite().all() and ((table > 0) & (table < 1)).all()
    certain = Counts(torch.full((3, 4), 500.0).double(), torch.full((3, 4), 500.0).double()).table()
    assert (certain > 0.9).all() and (certain < 1).all()


@pytest.mark.parametrize("verifier", [verify_tokenwise, verify_joint])
@torch.inference_mode()
def test_counts_of_one_tree_predict_another(verifier: Verifier) -> None:
    """Under traversal too: what is below a node, or behind its later siblings, does not change how often it is kept."""
    wide = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))
    counts, codes = {}, {}
    for shape in (wide, ((0,), (1,)), ((0,), (0, 0), (1,))):
        target = MarkovTarget(CHAIN, 4)
        proposer = TreeProposer(OtherMarkovDrafter(target, FAR), StaticTree(shape))
        loop = Engine(target, proposer, Exact(), Sampling(), Guidance(), 10_000, verifier=verifier)
        loop.observers.append(AcceptanceByRank(16))
        admit_all(loop, torch.arange(10_000))
        loop.step()
        counts[shape], codes[shape] = loop.observers[0], int(loop.observers[0].codes) / 10_000
    table = counts[wide].kept / counts[wide].tried.clamp(min=1)
    for shape, measured in codes.items():
        assert expected(table.double(), shape) == pytest.approx(measured, abs=0.03)


def chained(cut: float, batch: int = 1) -> Engine:
    """Chains of 3 that are cut."""
    target = MarkovTarget(FLAT, 4)
    proposer = Parallel(parallel(target), StaticTree(chain(3)))
    proposer.drafter.confidence.weight.mul_(0.5)
    proposer.drafter.confidence.bias.fill_(1)
    proposer.min_survival = cut
    return Engine(target, proposer, Exact(), Sampling(), Guidance(), batch, verifier=verify_joint)


@torch.inference_mode()
def test_what_cuts_keep_is_counted_from_chains_that_are_not_cut() -> None:
    """As a run with that cut keeps it, within what so many drafts tell."""
    cuts, loops = (1e-9, 0.4, 0.65), []
    for cut in cuts:
        loop = chained(cut, 5000)
        loop.observers += [CutCounts(cuts, 16), AcceptanceByRank(16)]
        admit_all(loop, torch.arange(5000))
        loop.step()  # the same drafts but for their ends; later ones differ by what was kept
        loops.append(loop)
    counts, *_ = loops[0].observers
    found = CutChains.of(cuts, [counts.to_json()])
    for place, loop in enumerate(loops):
        assert found.codes(place, 3) == pytest.approx(int(loop.observers[1].codes) / 5000, abs=0.03)
    assert found.codes(2, 3) < found.codes(1, 3) - 0.03 < found.codes(0, 3) - 0.9
    assert found.longest[:, 0].tolist() == [1, 1, 1] and sum(found.lengths(0, 3)) == pytest.approx(1)
    alone = probe(chained(0.65), engine(1, 4), chain(3), ["a"], [0], lambda codes: None, "block", 0.65)
    assert alone.nodes is not None and alone.nodes < 3 and alone.cuts is None
