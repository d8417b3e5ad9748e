"""A smaller target as drafter: what it guesses, the distribution of what is drawn, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.distributions import chi_square
from helpers.toys import MarkovTarget, ToyTarget, counts, smaller

from lanternpp.accept.exact import Exact
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.errors import InputError
from lanternpp.proposers.draft_model import DraftModel
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.trees.dynamic import DepthTree, DynamicTree
from lanternpp.trees.shapes import EAGLE, chain
from lanternpp.trees.static import StaticTree

CHAIN = torch.tensor([[0.5, 0.3, 0.2], [0.05, 0.15, 0.8], [0.6, 0.3, 0.1]])
FAR = torch.tensor([[0.1, 0.2, 0.7], [0.9, 0.05, 0.05], [0.3, 0.3, 0.4]])
HOLES = torch.tensor([[0.0, 0.4, 0.6], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
BUSHY = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
SAMPLING = Sampling(0.8, 8)


@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_children_are_drawn_from_what_the_smaller_target_says_there(cfg, steps):
    """Off by one here would only lower the codes per pass, silently."""
    target, guidance = ToyTarget(), Guidance(cfg)
    drafter = smaller(target)
    engine = Engine(target, DraftModel(drafter, StaticTree(EAGLE)), Exact(), SAMPLING, guidance, 1)
    engine.admit(0, "hill", 5)
    for _ in range(steps):
        engine.step()
    with torch.inference_mode():
        draft = engine.proposer.propose(engine.noise)
    prompt = drafter.prompt(["hill"], guidance.branches)
    decided = engine.codes[:, : int(engine.count[0])]
    for node in draft.probs[0].sum(-1).nonzero()[:, 0].tolist():  # every node with children
        line = draft.tree.mask[0, node].nonzero()[:, 0][1:]  # below the root
        codes = guidance.rows(torch.cat((decided, draft.codes[:, line]), 1))
        features = drafter.decoder.forward_sequence(torch.cat((prompt.embeds, drafter.embed(codes)), 1))[
            :, -1:
        ]
        expected = SAMPLING.probs(guidance.merge(drafter.head(features)))[:, 0]
        assert torch.allclose(draft.probs[:, node], expected, atol=1e-10), node


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


class RowsEnd(ToyTarget):
    """A format: the last code of every image row is code 0, which stands nowhere else."""

    def constrain(self, logits, index):
        codes = torch.arange(self.vocab)
        allowed = ((index + 1) % self.width == 0)[..., None] == (codes == 0)
        return logits.masked_fill(~allowed, float("-inf"))


@pytest.mark.parametrize("builder", [lambda: StaticTree(BUSHY), lambda: DynamicTree(2, 3, 6)])
def test_a_drafter_knows_what_the_format_forces(builder):
    """The target as its own drafter: were the drafts free of the format, some would be refused."""
    target = RowsEnd()
    plain = Engine(target, NoDraft(), Exact(), Sampling(0), Guidance(3.0), 2)
    expected = [h.codes.tolist() for h in generate(plain, ["sea", None], [1, 2])]
    assert all(codes[3::4] == [0, 0, 0, 0] for codes in expected)
    engine = Engine(target, DraftModel(target, builder()), Exact(), Sampling(0), Guidance(3.0), 2)
    for sample, codes in zip(generate(engine, ["sea", None], [1, 2]), expected, strict=True):
        assert sample.codes.tolist() == codes and sample.accepted == [1, 4, 4, 4, 3]


def test_a_drafter_of_other_codes_is_refused():
    target = ToyTarget()
    for other, names in (
        (ToyTarget(vocab=11), "16 of 11 codes and the target 16 of 12"),
        (ToyTarget(grid=3), "9 of 12 codes and the target 16 of 12"),
        (ToyTarget(seed=5), "codebook is another"),
    ):
        with pytest.raises(InputError, match=names):
            Engine(target, DraftModel(other, StaticTree(BUSHY)), Exact(), Sampling(), Guidance(), 1)
