from __future__ import annotations

import pytest
import torch
from helpers.toys import BRANCHING, RowsEnd, ToyTarget, codes_of, eagle, engine_of, neighbours

from lanternpp.accept.exact import Exact
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.engine.batching import generate
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.nn.backend import PYTORCH, backend
from lanternpp.proposers.draft_model import DraftModel
from lanternpp.proposers.jacobi import Jacobi
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.dynamic import DynamicTree
from lanternpp.trees.static import EAGLE, StaticTree

pytestmark = pytest.mark.usefixtures("without_gradients")

SAMPLING = Sampling(0.8, 8)
UNEVEN = ((0,), (1,), (2,), (1, 0), (1, 1), (1, 1, 0), (2, 0))
BUILDERS = {"static": StaticTree(EAGLE), "uneven": StaticTree(UNEVEN), "dynamic": DynamicTree(4, 4, 16)}


@pytest.mark.parametrize(("steps", "cfg"), [(0, 3.0), (1, 3.0), (3, 3.0), (3, 1.0)])
@pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS)
def test_the_draft_is_that_of_the_drafter_over_all_decided_codes(steps, cfg, builder):
    """An error of one place would only lower the codes per pass."""
    target, guidance = ToyTarget(), Guidance(cfg)
    drafter = eagle(target)
    engine = engine_of(target, TreeProposer(drafter, builder), 1, SAMPLING, cfg)
    engine.admit(0, "hill", 5)
    for _ in range(steps):
        engine.step()
    count = int(engine.count[0])
    assert count == 1 if steps == 0 else count > 1
    draft = engine.proposer.propose(engine.noise)
    prompt = target.prompt(["hill"], guidance.branches)
    assert prompt.start.tolist() == [0] * guidance.branches
    codes = guidance.rows(engine.codes[:, :count])
    for node, children in enumerate(draft.tree.children[0]):
        there = children >= 0
        if not there.any():
            continue
        path = draft.tree.mask[0, node].nonzero()[:, 0][1:]  # below the root
        drafted = guidance.rows(draft.codes[:, path])
        inputs = torch.cat((prompt.embeds, target.embed(codes[:, :-1])), 1)
        features = target.decoder.forward_sequence(inputs)  # of all that the target has seen
        decided = torch.cat((prompt.embeds, target.embed(codes)), 1)[:, 1:]
        for i in range(drafted.shape[1] + 1):  # the target's features first, then the drafter's own
            feature = drafter.forward_sequence(decided, features)[:, -1:]
            if i < drafted.shape[1]:
                features = torch.cat((features, feature), 1)
                decided = torch.cat((decided, target.embed(drafted[:, i : i + 1])), 1)
        expected = SAMPLING.probs(guidance.merge(target.head(feature)))[:, 0]
        if draft.probs is None:
            likeliest = expected[0].topk(len(children)).indices
            assert torch.equal(draft.codes[0, children[there]], likeliest[there]), node
        else:
            assert torch.allclose(draft.probs[:, node], expected, atol=1e-10), node


@pytest.mark.parametrize("used", [PYTORCH, backend()], ids=["PyTorch", "C"])
@pytest.mark.parametrize("vocab", [1, 2, 3])
def test_a_greedy_tree_with_more_children_than_there_are_codes_is_plain_ar(vocab, used):
    target = ToyTarget(vocab).float()
    drafter = eagle(target).float()
    drawn = []
    for proposer in (NoDraft(), TreeProposer(drafter, StaticTree(EAGLE))):
        engine = engine_of(target, proposer, 1, Sampling(0, backend=used), 3.0)
        drawn.append(codes_of(engine, [None, None], [1, 2]))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("rule", [Exact, Lantern, LanternPlusPlus], ids=["exact", "lantern", "lantern++"])
def test_a_code_that_the_format_forces_is_drawn_with_every_draft_and_rule(rule):
    """No rule is so relaxed that it breaks the format: nearly every neighbour may be accepted here."""
    target = RowsEnd()
    most = {Lantern: [0.9], LanternPlusPlus: [1000.0]}.get(rule)
    made = rule(neighbours(target.book, 10), *most) if most else rule()
    proposers = TreeProposer(eagle(target), StaticTree(EAGLE)), Jacobi(6), Jacobi(6, "maximal", "mixed")
    for proposer, sampling in zip(proposers, (Sampling(), Sampling(0), Sampling(0.7, 5)), strict=True):
        for cfg in (1.0, 3.0):
            engine = engine_of(target, proposer, 2, sampling, cfg, made)
            for codes in codes_of(engine, ["sea", "hill", "a"], [1, 2, 3]):
                sevens = (torch.tensor(codes) == 7).view(4, 4)
                assert sevens[:, 3].all() and not sevens[:, :3].any()


@pytest.mark.parametrize("builder", [lambda: StaticTree(BRANCHING), lambda: DynamicTree(2, 3, 6)])
def test_drafts_of_a_smaller_target_follow_the_format(builder):
    """The target is its own drafter: if its drafts ignored the format, some of their codes would be rejected."""
    target = RowsEnd()
    given = ["sea", None], [1, 2]
    expected = codes_of(engine_of(target, NoDraft(), 2, Sampling(0), 3.0), *given)
    assert all(codes[3::4] == [7, 7, 7, 7] for codes in expected)
    engine = engine_of(target, DraftModel(target, builder()), 2, Sampling(0), 3.0)
    for sample, codes in zip(generate(engine, *given), expected, strict=True):
        assert sample.codes.tolist() == codes and sample.accepted == [1, 4, 4, 4, 3]
