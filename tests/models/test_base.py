from __future__ import annotations

import pytest
import torch
from helpers.toys import RowsEnd, ToyTarget, eagle, neighbours

from lanternpp.accept.exact import Exact
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.proposers.jacobi import Jacobi
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.static import EAGLE, StaticTree


@pytest.mark.parametrize("rule", [Exact, Lantern, LanternPlusPlus], ids=["exact", "lantern", "lantern++"])
def test_what_the_format_forces_is_drawn_and_nothing_else_whatever_is_drafted(rule):
    """No rule is so relaxed that it breaks the format: nearly every neighbour lends here."""
    target = RowsEnd()
    most = {Lantern: [0.9], LanternPlusPlus: [1000.0]}.get(rule)
    decides = rule(neighbours(target.book, 10), *most) if most else rule()
    proposers = TreeProposer(eagle(target), StaticTree(EAGLE)), Jacobi(6), Jacobi(6, "maximal", "mixed")
    for proposer, sampling in zip(proposers, (Sampling(), Sampling(0), Sampling(0.7, 5)), strict=True):
        for cfg in (1.0, 3.0):
            engine = Engine(target, proposer, decides, sampling, Guidance(cfg), 2)
            for sample in generate(engine, ["sea", "hill", "a"], [1, 2, 3]):
                sevens = (sample.codes == 7).view(4, 4)
                assert sevens[:, 3].all() and not sevens[:, :3].any()


def test_feature_i_predicts_code_i():
    target = ToyTarget()
    codes = torch.arange(16)[None] % 12
    prompt = target.prompt(["hill"], 1).embeds
    features = target.forward_sequence(prompt, codes)
    assert features.shape == (1, 16, 16)
    other = codes.clone()
    other[0, 5] = 11
    changed = (target.forward_sequence(prompt, other) != features).any(-1)[0]
    assert changed.tolist() == [False] * 6 + [True] * 10
