from __future__ import annotations

import pytest
import torch
from helpers.toys import OracleDrafter, ToyTarget, eagle

from lanternpp.accept.exact import Exact
from lanternpp.drafters.base import Drafter
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.nn.backend import PYTORCH, backend
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.shapes import EAGLE, chain
from lanternpp.trees.static import StaticTree

SAMPLING = Sampling(0.8, 8)


@pytest.fixture(autouse=True)
def without_gradients():
    """As the engine calls a proposer."""
    with torch.inference_mode():
        yield


class Spy(Drafter):
    """An EAGLE drafter that keeps what it was told and answered."""

    def __init__(self, drafter):
        super().__init__()
        self.inner, self.decoder, self.calls = drafter, drafter.decoder, []

    def forward(self, next_embeds, features, nodes, cache):
        out = self.inner(next_embeds, features, nodes, cache)
        self.calls.append((next_embeds.clone(), features.clone(), out.clone()))
        return out


@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_draft_comes_from_the_drafter_run_over_all_that_is_decided(cfg, steps):
    """Off by one here would only lower the codes per pass, silently."""
    target, guidance = ToyTarget(), Guidance(cfg)
    drafter = eagle(target)
    engine = Engine(target, TreeProposer(drafter, StaticTree(EAGLE)), Exact(), SAMPLING, guidance, 1)
    engine.admit(0, "hill", 5)
    for _ in range(steps):
        engine.step()
    count = int(engine.count[0])
    assert count == 1 if steps == 0 else count > 1
    draft = engine.proposer.propose(engine.noise)
    prompt = target.prompt(["hill"], guidance.branches)
    assert prompt.start.tolist() == [0] * guidance.branches
    codes = guidance.rows(engine.codes[:, :count])
    for node in draft.probs[0].sum(-1).nonzero()[:, 0].tolist():  # every node with children
        line = draft.tree.mask[0, node].nonzero()[:, 0][1:]  # below the root
        drafted = guidance.rows(draft.codes[:, line])
        features = target.states(prompt.embeds, codes)  # of all that the target has seen
        decided = torch.cat((prompt.embeds, target.embed(codes)), 1)[:, 1:]
        for i in range(drafted.shape[1] + 1):  # the target's features first, then the drafter's own
            guess = drafter.forward_sequence(decided, features)[:, -1:]
            if i < drafted.shape[1]:
                features = torch.cat((features, guess), 1)
                decided = torch.cat((decided, target.embed(drafted[:, i : i + 1])), 1)
        expected = SAMPLING.probs(guidance.merge(target.head(guess)))[:, 0]
        assert torch.allclose(draft.probs[:, node], expected, atol=1e-10), node


def test_after_a_pass_the_drafter_hears_the_targets_features_of_the_kept_path():
    target = ToyTarget()
    spy = Spy(eagle(target))
    engine = Engine(target, TreeProposer(spy, StaticTree(EAGLE)), Exact(), Sampling(), Guidance(), 1)
    engine.admit(0, "hill", 5)
    while int(engine.passes[0]) < 3:
        before = int(engine.count[0])
        spy.calls.clear()
        engine.step()
    kept = int(engine.count[0]) - before
    next_embeds, features, out = spy.calls[-1]
    codes = engine.codes[:, : int(engine.count[0])]
    prompt = target.prompt(["hill"], 1)
    known = target.states(prompt.embeds, codes)
    assert torch.allclose(features[:, :kept], known[:, -kept:], atol=1e-10)
    assert torch.equal(next_embeds[:, :kept], target.embed(codes[:, -kept:]))
    assert torch.equal(engine.proposer.features[:, 0], out[:, kept - 1])
    assert engine.proposer.root.tolist() == codes[:, -1].tolist()


def test_what_a_draft_was_drawn_from_is_warped_as_the_target_is():
    target = ToyTarget()
    engine = Engine(
        target, TreeProposer(eagle(target), StaticTree(EAGLE)), Exact(), SAMPLING, Guidance(3.0), 2
    )
    engine.admit(0, "hill", 5)
    engine.admit(1, "sea", 6)
    draft = engine.proposer.propose(engine.noise)
    inner = draft.probs.sum(-1) > 0
    assert ((draft.probs > 0).sum(-1)[inner] == 8).all()
    assert torch.allclose(draft.probs.sum(-1)[inner], torch.ones(()).double())


def test_an_oracle_sees_what_the_target_sees():
    target = ToyTarget()
    engine = Engine(
        target, TreeProposer(OracleDrafter(target), StaticTree(chain(4))), Exact(), Sampling(), Guidance(), 1
    )
    engine.admit(0, "hill", 5)
    draft = engine.proposer.propose(engine.noise)
    prompt = target.prompt(["hill"], 1)
    p = target.head(
        target.forward_sequence(prompt.embeds, torch.cat((draft.codes, draft.codes[:, :1]), 1))
    ).softmax(-1)
    assert torch.allclose(draft.probs[:, :4], p[:, 1:5], atol=1e-10)


def test_nothing_proposes_the_root_and_no_copy_of_its_own_state():
    proposer = NoDraft()
    proposer.open(ToyTarget(), Sampling(), Guidance(), 2)
    proposer.root.copy_(torch.tensor([3, 4]))
    draft = proposer.propose(None)
    assert draft.codes.tolist() == [[3], [4]] and draft.probs is None and proposer.depth == 0
    draft.codes.zero_()
    assert proposer.root.tolist() == [3, 4]


def test_a_newcomer_leaves_the_others_drafts_alone():
    target = ToyTarget()
    engine = Engine(
        target, TreeProposer(eagle(target), StaticTree(EAGLE)), Exact(), Sampling(), Guidance(3.0), 2
    )
    engine.admit(0, "hill", 5)
    engine.step()
    before = engine.proposer.propose(engine.noise)
    codes, probs = before.codes[0].clone(), before.probs[0].clone()
    engine.admit(1, "sea", 6)
    after = engine.proposer.propose(engine.noise)
    assert torch.equal(after.codes[0], codes) and torch.equal(after.probs[0], probs)


@pytest.mark.parametrize("used", [PYTORCH, backend()], ids=["PyTorch", "C"])
@pytest.mark.parametrize("vocab", [1, 2, 3])
def test_a_greedy_tree_with_more_children_than_there_are_codes_is_plain_ar(vocab, used):
    target = ToyTarget(vocab).float()
    drafter = eagle(target).float()
    drawn = []
    for proposer in (NoDraft(), TreeProposer(drafter, StaticTree(EAGLE))):
        engine = Engine(target, proposer, Exact(), Sampling(0, backend=used), Guidance(3.0), 1)
        drawn.append([sample.codes.tolist() for sample in generate(engine, [None, None], [1, 2])])
    assert drawn[0] == drawn[1]
