from __future__ import annotations

import pytest
import torch
from helpers.toys import RowsEnd, ToyTarget, eagle, neighbours

from lanternpp.accept.exact import Exact
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.proposers.jacobi import Jacobi
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.shapes import EAGLE
from lanternpp.trees.static import StaticTree


def test_what_the_format_forces_is_drawn_and_nothing_else_whatever_is_drafted():
    target = RowsEnd()
    for sampling in (Sampling(), Sampling(0), Sampling(0.7, 5)):
        proposer = TreeProposer(eagle(target), StaticTree(EAGLE))
        for cfg in (1.0, 3.0):
            engine = Engine(target, proposer, Exact(), sampling, Guidance(cfg), 2)
            for sample in generate(engine, ["sea", "hill", "a"], [1, 2, 3]):
                sevens = (sample.codes == 7).view(4, 4)
                assert sevens[:, 3].all() and not sevens[:, :3].any()


@pytest.mark.parametrize("rule", [Lantern, LanternPlusPlus], ids=["lantern", "lantern++"])
def test_no_rule_is_so_relaxed_that_it_breaks_the_format(rule):
    target = RowsEnd()
    most = {Lantern: 0.9, LanternPlusPlus: 1000.0}[rule]  # nearly every neighbour lends
    relaxed = rule(neighbours(target.book, 10), most)
    for proposer in (
        TreeProposer(eagle(target), StaticTree(EAGLE)),
        Jacobi(6),
        Jacobi(6, "maximal", "mixed"),
    ):
        engine = Engine(target, proposer, relaxed, Sampling(), Guidance(1.0), 2)
        for sample in generate(engine, ["sea", "hill", "a", "moon"], [1, 2, 3, 4]):
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
    assert torch.equal(target.states(prompt, codes)[:, 2:], features)
