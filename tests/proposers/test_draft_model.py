"""A smaller target as drafter: what it guesses, the distribution of what is drawn, and what it refuses."""

from __future__ import annotations

import math

import pytest
from helpers.distributions import chi_square
from helpers.toys import BUSHY, CHAIN, FAR, HOLES, MarkovTarget, RowsEnd, counts

from lanternpp.accept.exact import Exact
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.proposers.draft_model import DraftModel
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.trees.dynamic import DepthTree, DynamicTree
from lanternpp.trees.shapes import chain
from lanternpp.trees.static import StaticTree

SAMPLING = Sampling(0.8, 8)


@pytest.mark.parametrize(
    ("table", "builder"),
    [
        (HOLES, lambda: StaticTree(chain(2))),
        (FAR, lambda: StaticTree(BUSHY)),
        (FAR, lambda: DepthTree(2, 3, 6, 1, math.log(0.9))),
    ],
    ids=["chain", "tree", "ddd"],
)
def test_the_first_codes_follow_the_targets_distribution(table, builder):
    target = MarkovTarget(CHAIN)
    engine = Engine(
        target, DraftModel(MarkovTarget(table), builder()), Exact(), Sampling(), Guidance(), 50_000
    )
    assert chi_square(counts(engine, 3, 100_000), target.distribution(3)) > 1e-3


@pytest.mark.parametrize("builder", [lambda: StaticTree(BUSHY), lambda: DynamicTree(2, 3, 6)])
def test_a_drafter_knows_what_the_format_forces(builder):
    """The target as its own drafter: were the drafts free of the format, some would be refused."""
    target = RowsEnd()
    plain = Engine(target, NoDraft(), Exact(), Sampling(0), Guidance(3.0), 2)
    expected = [h.codes.tolist() for h in generate(plain, ["sea", None], [1, 2])]
    assert all(codes[3::4] == [7, 7, 7, 7] for codes in expected)
    engine = Engine(target, DraftModel(target, builder()), Exact(), Sampling(0), Guidance(3.0), 2)
    for sample, codes in zip(generate(engine, ["sea", None], [1, 2]), expected, strict=True):
        assert sample.codes.tolist() == codes and sample.accepted == [1, 4, 4, 4, 3]
