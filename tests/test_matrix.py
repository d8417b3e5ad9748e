"""Every proposer with every rule, sampling and guidance. A new proposer, tree or rule adds one row to `helpers.steps`."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import pytest
import torch
from helpers import steps
from helpers.steps import JOINT, SAMPLINGS
from helpers.toys import OracleDrafter, ToyTarget, neighbours, parallel

from lanternpp.accept.exact import Exact
from lanternpp.accept.scaled import Cool
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine, FinishedSample
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.engine.verify.choose import VERIFIERS
from lanternpp.proposers.draft_model import DraftModel
from lanternpp.proposers.parallel import Parallel
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.dynamic import DynamicTree
from lanternpp.trees.static import EAGLE, StaticTree, chain

ORACLES = {  # the drafter is the target: all must be kept
    "oracle chain": lambda target: TreeProposer(OracleDrafter(target), StaticTree(chain(4))),
    "oracle tree": lambda target: TreeProposer(OracleDrafter(target), StaticTree(EAGLE)),
    "independent oracle": lambda target: DraftModel(target, StaticTree(steps.BUSHY)),
}
PROPOSERS = {
    **steps.PROPOSERS,
    **ORACLES,
    "parallel eagle2": lambda target: Parallel(parallel(target), DynamicTree(3, 3, 9)),
    "longer than the picture": lambda target: Parallel(parallel(target, 13, (0,)), StaticTree(chain(12))),
}
# Proposers whose drafts are not verified by a walk, with their verifiers.
OTHERWISE = [
    *JOINT,
    ("oracle chain", "block"),
    ("oracle tree", "traversal"),
    ("longer than the picture", "block"),
]
RULES = {
    **steps.RULES,
    # Above 1 at every level here: below it, even an oracle is refused.
    "cool": lambda table: Cool(2.6, 0.2),
}
WAYS_TO_DRAW = [
    *("chain", "tree", "eagle2", "parallel tree", "independent eagle2"),
    *("jacobi gumbel above", "jacobi maximal mixed", "jacobi siblings", "jacobi rows"),
]
WARPED = ["eagle2", "parallel tree", "jacobi siblings"]  # those of them that rules meet at other samplings
CHAINS = ["chain", "parallel", "longer than the picture"]
OTHER_RESIDUALS = ["lantern, paper", "lantern++, paper", "cool, paper"]  # they differ only in what is drawn
CFG = [1.0, 3.0]
# Toy prompts differ with the word's length: the first is padded, the last is not.
CONDITIONS = ["a", None, "hill"]
SEEDS = [3, 4, 1 << 40]

every_proposer = pytest.mark.parametrize("proposer", PROPOSERS)
every_cfg = pytest.mark.parametrize("cfg", CFG)


def combinations():
    """Every proposer, verifier, rule, sampling and guidance, but for those that add nothing to the others.

    A rule sees probabilities, which guidance and top-k made before, and a draft's children. So the exact rule meets every
    sampling under guidance and one without; the others meet every way to draw children at T=1 under guidance, and other samplings with
    a few. Plain decoding asks no rule, and the papers' residuals are of token-wise verification.
    """
    for proposer, rule, sampling, cfg in product(PROPOSERS, RULES, SAMPLINGS, CFG):
        usual = cfg == 3 and sampling == "T=1"
        if rule == "exact":
            fits = cfg == 3 or sampling == "T=1"
        elif rule in ("mixture", "cactus"):
            fits = usual and proposer in CHAINS
        elif proposer in WAYS_TO_DRAW:
            fits = usual or (cfg == 3 and proposer in WARPED and rule not in OTHER_RESIDUALS)
        else:
            fits = usual and rule not in OTHER_RESIDUALS and (proposer in ORACLES or rule == "lantern")
        if fits and (proposer != "none" or rule == "exact"):
            yield proposer, "token", rule, sampling, cfg
    relaxed = ("lantern", "lantern++", "lantern++, falling", "cool", "mixture")
    for (proposer, verify), rule in product(OTHERWISE, ("exact", *relaxed)):
        yield proposer, verify, rule, "warped" if rule == "exact" else "T=1", 3.0


@cache
def draw(
    proposer: str, rule: str, sampling: str, cfg: float, batch: int, verify: str = "token"
) -> list[FinishedSample]:
    """The conditions, through the whole loop."""
    model = ToyTarget(grid=3)
    acceptance = RULES[rule](neighbours(model.codebook, 5))
    parts = PROPOSERS[proposer](model), acceptance, SAMPLINGS[sampling], Guidance(cfg), batch
    return generate(Engine(model, *parts, verifier=VERIFIERS[verify]), CONDITIONS, SEEDS)


def codes(samples: list[FinishedSample]) -> list[list[int]]:
    return [h.codes.tolist() for h in samples]


@pytest.mark.parametrize(("proposer", "verify", "rule", "sampling", "cfg"), list(combinations()))
def test_neither_the_batch_nor_when_a_sample_enters_matters_and_passes_add_up(
    proposer, verify, rule, sampling, cfg
):
    alone = draw(proposer, rule, sampling, cfg, 1, verify)
    together = draw(proposer, rule, sampling, cfg, 2, verify)  # the last one enters as another leaves
    assert codes(together) == codes(alone)
    assert [h.accepted for h in together] == [h.accepted for h in alone]
    model = ToyTarget(grid=3)
    most = PROPOSERS[proposer](model).depth + 1
    for sample in together:
        assert sample.codes.shape == (model.length,)
        assert 0 <= sample.codes.min() and sample.codes.max() < model.vocab
        assert sample.accepted[0] == 1 and sum(sample.accepted) == model.length
        assert all(1 <= kept <= most for kept in sample.accepted)
        assert proposer != "none" or len(sample.accepted) == model.length
        if proposer in ORACLES:  # all that it drafts is kept
            full, rest = divmod(model.length - 1, most)
            assert sample.accepted == [1] + [most] * full + [rest] * (rest > 0)


@every_proposer
@every_cfg
def test_greedy_exact_is_plain_ar_code_by_code(proposer, cfg):
    plain = codes(draw("none", "exact", "greedy", cfg, 1))
    assert codes(draw(proposer, "exact", "greedy", cfg, 2)) == plain


@every_cfg
@pytest.mark.parametrize("sampling", ["greedy", "T=1"])
@pytest.mark.parametrize("proposer", ["tree", "eagle2", "independent", "jacobi maximal mixed"])
def test_the_toys_can_tell_right_from_wrong(proposer, sampling, cfg):
    drawn = draw(proposer, "exact", sampling, cfg, 2)
    passes = [len(h.accepted) for h in drawn]
    length = len(drawn[0].codes)
    assert all(math.ceil((length - 1) / 6) + 1 < n for n in passes), (
        "a drafter that is always right tests nothing"
    )
    assert any(n < length for n in passes), "a drafter that is always wrong tests nothing"
    assert len({tuple(c) for c in codes(drawn)}) > 1 and len(set(codes(drawn)[0])) > 2


@every_cfg
def test_guidance_and_the_prompt_reach_the_picture(cfg):
    first = codes(draw("none", "exact", "T=1", cfg, 2))
    assert len({tuple(c) for c in first}) == len(CONDITIONS)
    other = CFG[1 - CFG.index(cfg)]
    assert codes(draw("none", "exact", "T=1", other, 2))[0] != first[0]


@pytest.mark.parametrize("proposer", ["none", "eagle2", "parallel tree", "independent", "jacobi rows"])
def test_stepping_on_does_not_touch_a_finished_sample(proposer):
    model = ToyTarget()
    engine = Engine(model, PROPOSERS[proposer](model), Exact(), Sampling(), Guidance(3.0), 2)
    assert engine.done() == [0, 1], "every slot is idle at first"
    engine.admit(0, "sea", 1)
    while 0 not in engine.done():
        engine.step()
    before = engine.collect(0)
    engine.admit(1, "hill", 2)
    while 1 not in engine.done():
        engine.step()
    after = engine.collect(0)
    assert torch.equal(after.codes, before.codes) and after.accepted == before.accepted
