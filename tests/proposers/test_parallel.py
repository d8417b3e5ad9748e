from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.toys import ToyTarget, codes_of, engine_of, observed_step, parallel

from lanternpp.drafters.base import Drafter
from lanternpp.drafters.parallel import ParallelDrafter, branch_mask
from lanternpp.engine.decode import Engine
from lanternpp.engine.proposer import Parts
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.errors import InputError
from lanternpp.proposers.parallel import Parallel
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.static import EAGLE, StaticTree, chain

pytestmark = pytest.mark.usefixtures("without_gradients")

SAMPLING = Sampling(0.8, 8)


def step_and_hints(loop: Engine) -> torch.Tensor:
    """Take a step; return the features of its pass at the places after those it decided, [depth, D], 0 beyond the draft."""
    before = int(loop.count[0])
    output, kept = observed_step(loop), int(loop.count[0]) - before
    features, depths = loop.guidance.merge(output.features)[0, :, :16], output.draft.tree.depth[0].tolist()
    path = [features[depths.index(d)] if d in depths else features[0] * 0 for d in range(12)]
    return torch.stack(path[kept : kept + loop.proposer.depth])


@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize(
    ("steps", "said", "aux_layers"),
    [
        (0, "hill", ()),
        (1, "hill", ()),
        (3, "hill", ()),
        (3, "sea", ()),
        (0, "sea", (0, 1)),
        (3, "sea", (0, 1)),
    ],
)
def test_the_draft_is_that_of_the_drafter_over_all_decided_codes(cfg, steps, said, aux_layers):
    """An error of one place would only lower the codes per pass."""
    target, guidance = ToyTarget(layers=3), Guidance(cfg)
    drafter = parallel(target, 4, aux_layers)
    loop = engine_of(target, Parallel(drafter, StaticTree(EAGLE)), 1, SAMPLING, cfg)
    loop.admit(0, said, 5)
    hints = torch.zeros(1, 40, 16, dtype=torch.float64)  # of rejected codes, for each slot of the drafter
    for _ in range(steps):
        hint = step_and_hints(loop)
        hints[0, target.slots + int(loop.count[0]) - 2] = hint[0]
    count = int(loop.count[0])
    assert count + 5 < target.length, "the queries' places lie inside the picture"
    draft = loop.proposer.propose(loop.noise)
    prompt = target.prompt([said], guidance.branches)
    assert prompt.start[0] == (said == "sea"), "one of the two is padded"
    codes = loop.codes[:, :count]
    read = torch.cat((prompt.embeds, target.embed(guidance.rows(codes))), 1)[:, :-1]
    slot = torch.arange(read.shape[1])[None]
    mask = branch_mask(slot, slot, prompt.start)
    features = guidance.merge(target.decoder.forward_sequence(read, slot, mask, aux_layers))
    ahead = torch.cat((prompt.embeds[:1], target.embed(codes)), 1)[:, 1:]
    anchor = torch.tensor([[features.shape[1] - 1]])
    all_hints = hints[:, : features.shape[1] + 4]
    if steps:
        all_hints[0, features.shape[1] :] = hint[1:]
    first, more = drafter.forward_sequence(ahead, features, anchor, 4, prompt.start[:1], all_hints)
    for node in draft.probs[0].sum(-1).nonzero()[:, 0].tolist():  # every node with children
        depth = int(draft.tree.depth[0, node])
        if depth == 0:
            feature = first[:, -1]
        else:
            feature = drafter.condition_on(more[:, 0, depth - 1], target.embed(draft.codes[:, node]))
        expected = SAMPLING.probs(target.head(feature))
        assert torch.allclose(draft.probs[:, node], expected, atol=1e-10), node


def test_a_subclass_of_a_chain_is_grown_by_its_own_method():
    class OwnChain(StaticTree):
        def grow(self, root, q, extend, children):
            raise ArithmeticError

    loop = engine_of(ToyTarget(), Parallel(parallel(ToyTarget()), OwnChain(chain(3))))
    assert not loop.proposer.supports_fused_steps
    loop.admit(0, None, 0)
    with pytest.raises(ArithmeticError):
        loop.step()


class OwnDrafter(Drafter):
    """A custom drafter with the layers that `Parallel` reads."""

    proposer = "lanternpp.proposers.parallel:Parallel"
    aux_layers, confidence = (), None

    def __init__(self, other: ParallelDrafter):
        super().__init__()
        self.decoder, self.down, self.before, self.combine = (
            other.decoder,
            other.down,
            other.before,
            other.combine,
        )
        self.run = other.forward

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.run(*inputs)


def test_a_custom_drafter_with_the_layers_that_parallel_reads_draws_the_same_chain():
    target, drawn = ToyTarget(), []
    for kind in (lambda drafter: drafter, OwnDrafter):
        loop = engine_of(target, Parallel(kind(parallel(target)), StaticTree(chain(3))))
        drawn.append(codes_of(loop, ["hill"], [1]))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("named", [TreeProposer, Parallel])
def test_the_drafter_decides_the_proposer(named):
    drafter = parallel(ToyTarget())
    parts = Parts(StaticTree(EAGLE), drafter)
    assert type(named.build(parts)) is Parallel


def test_min_survival_needs_a_drafter_that_predicts_acceptance():
    target, tree = ToyTarget(), StaticTree(chain(3))
    older = parallel(target, confidence=False)
    assert (
        Parallel.build(Parts(tree, older)).min_survival == 0
        and Parallel.build(Parts(tree, older, min_survival=0.0)).min_survival == 0
    )
    with pytest.raises(
        InputError, match=r"min_survival 0\.3 needs a parallel drafter that predicts .* train it again"
    ):
        Parallel.build(Parts(tree, older, min_survival=0.3))
    assert Parallel.build(Parts(tree, parallel(target), min_survival=0.3)).min_survival == 0.3
