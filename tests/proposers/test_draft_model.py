"""A smaller target as drafter: what it guesses. `engine/test_distribution.py` has the distribution of what is drawn."""

from __future__ import annotations

import pytest
from helpers.toys import BUSHY, RowsEnd, codes_of, engine_of

from lanternpp.engine.batching import generate
from lanternpp.engine.sampling import Sampling
from lanternpp.proposers.draft_model import DraftModel
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.trees.dynamic import DynamicTree
from lanternpp.trees.static import StaticTree


@pytest.mark.parametrize("builder", [lambda: StaticTree(BUSHY), lambda: DynamicTree(2, 3, 6)])
def test_a_drafter_knows_what_the_format_forces(builder):
    """The target as its own drafter: were the drafts free of the format, some would be refused."""
    target = RowsEnd()
    given = ["sea", None], [1, 2]
    expected = codes_of(engine_of(target, NoDraft(), 2, Sampling(0), 3.0), *given)
    assert all(codes[3::4] == [7, 7, 7, 7] for codes in expected)
    engine = engine_of(target, DraftModel(target, builder()), 2, Sampling(0), 3.0)
    for sample, codes in zip(generate(engine, *given), expected, strict=True):
        assert sample.codes.tolist() == codes and sample.accepted == [1, 4, 4, 4, 3]
