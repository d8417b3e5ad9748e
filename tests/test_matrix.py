"""Every proposer with every rule, sampling and guidance. A new proposer, tree or rule adds one row to `helpers.steps`."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import pytest
from helpers import steps
from helpers.steps import JOINT, SAMPLINGS
from helpers.toys import OracleDrafter, ToyTarget, neighbours, parallel

from lanternpp.accept.scaled import Cool
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine, FinishedSample
from lanternpp.engine.sampling import Guidance
from lanternpp.engine.verify import VERIFIERS
from lanternpp.proposers.draft_model import DraftModel
from lanternpp.proposers.parallel import Parallel
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.dynamic import DynamicTree
from lanternpp.trees.static import EAGLE, StaticTree, chain

ORACLES = {  # the drafter is the target: all codes must be accepted
    "oracle chain": lambda target: TreeProposer(OracleDrafter(target), StaticTree(chain(4))),
    "oracle tree": lambda target: TreeProposer(OracleDrafter(target), StaticTree(EAGLE)),
    "independent oracle": lambda target: DraftModel(target, StaticTree(steps.SMALL_TREE)),
}
PROPOSERS = {
    **steps.PROPOSERS,
    **ORACLES,
    "parallel eagle2": lambda target: Parallel(parallel(target), DynamicTree(3, 3, 9)),
    "longer than the picture": lambda target: Parallel(parallel(target, 13, (0,)), StaticTree(chain(12))),
}
# Proposers whose drafts are verified jointly, with their verifiers.
JOINTLY = [
    *JOINT,
    ("oracle chain", "block"),
    ("oracle tree", "traversal"),
    ("longer than the picture", "block"),
]
# Those of them that meet relaxed rules: a draft of each shape, and drafts of which all codes are accepted.
RELAXED_JOINTLY = "chain", "tree", "jacobi siblings", "oracle chain", "oracle tree", "longer than the picture"
RULES = {
    **steps.RULES,
    # Above 1 at every level here: below it, even an oracle's codes are rejected.
    "cool": lambda table: Cool(2.6, 0.2),
}
WAYS_TO_DRAW = [
    *("chain", "tree", "eagle2", "parallel tree", "independent eagle2"),
    *("jacobi gumbel above", "jacobi maximal mixed", "jacobi siblings", "jacobi rows"),
]
WARPED = ["eagle2", "parallel tree", "jacobi siblings"]  # those of them that rules meet at other samplings
UNGUIDED = ["none", "tree", "parallel tree", "independent", "jacobi siblings"]  # a draft of each proposer
CHAINS = ["chain", "parallel", "longer than the picture"]
OTHER_RESIDUALS = ["lantern, paper", "lantern++, paper", "cool, paper"]  # they differ only in what is drawn
CFG = [1.0, 3.0]
# Toy prompts differ with the word's length: the first is padded, the last is not.
CONDITIONS = ["a", None, "hill"]
SEEDS = [3, 4, 1 << 40]
TARGET = ToyTarget(grid=3)

every_proposer = pytest.mark.parametrize("proposer", PROPOSERS)
every_cfg = pytest.mark.parametrize("cfg", CFG)


def combinations():
    """Every proposer, verifier, rule, sampling and guidance, except combinations that the others cover.

    A rule sees probabilities, which guidance and top-k made before, and a draft's children. So the exact rule meets every
    proposer under guidance, and a few without; the others meet every way to draw children at T=1 under guidance, and other samplings
    with a few, as do the papers' residuals, which are of token-wise verification. Plain decoding asks no rule. Greedy codes of the exact rule
    are compared with those of plain decoding, alone, below.
    """
    for proposer, rule, sampling, cfg in product(PROPOSERS, RULES, SAMPLINGS, CFG):
        usual = cfg == 3 and sampling == "T=1"
        if rule == "exact":
            fits = sampling != "greedy" and (cfg == 3 or (sampling == "T=1" and proposer in UNGUIDED))
        elif rule in ("mixture", "cactus"):
            fits = usual and proposer in CHAINS
        elif proposer in WAYS_TO_DRAW:
            fits = usual and (proposer in WARPED or rule not in OTHER_RESIDUALS)
            fits |= cfg == 3 and proposer in WARPED and rule not in (*OTHER_RESIDUALS, "lantern++")
        else:
            fits = usual and rule not in OTHER_RESIDUALS and (proposer in ORACLES or rule == "lantern")
        if fits and (proposer != "none" or rule == "exact"):
            yield proposer, "token", rule, sampling, cfg
    relaxed = ("lantern", "lantern++, falling", "cool", "mixture")
    for (proposer, verify), rule in product(JOINTLY, ("exact", *relaxed)):
        if rule == "exact" or proposer in RELAXED_JOINTLY:
            yield proposer, verify, rule, "warped" if rule == "exact" else "T=1", 3.0


@cache
def draw(
    proposer: str, rule: str, sampling: str, cfg: float, batch: int, verify: str = "token"
) -> list[FinishedSample]:
    """The conditions, through the whole loop."""
    acceptance = RULES[rule](neighbours(TARGET.codebook, 5))
    parts = PROPOSERS[proposer](TARGET), acceptance, SAMPLINGS[sampling], Guidance(cfg), batch
    return generate(Engine(TARGET, *parts, verifier=VERIFIERS[verify]), CONDITIONS, SEEDS)


def codes(samples: list[FinishedSample]) -> list[list[int]]:
    return [sample.codes.tolist() for sample in samples]


@pytest.mark.parametrize(("proposer", "verify", "rule", "sampling", "cfg"), list(combinations()))
def test_samples_do_not_depend_on_the_batch_and_their_passes_add_up(proposer, verify, rule, sampling, cfg):
    alone = draw(proposer, rule, sampling, cfg, 1, verify)
    # the last one is admitted when another is finished
    together = draw(proposer, rule, sampling, cfg, 2, verify)
    assert codes(together) == codes(alone)
    assert [sample.accepted for sample in together] == [sample.accepted for sample in alone]
    most = PROPOSERS[proposer](TARGET).depth + 1
    for sample in together:
        assert sample.codes.shape == (TARGET.length,)
        assert 0 <= sample.codes.min() and sample.codes.max() < TARGET.vocab
        assert sample.accepted[0] == 1 and sum(sample.accepted) == TARGET.length
        assert all(1 <= kept <= most for kept in sample.accepted)
        assert proposer != "none" or len(sample.accepted) == TARGET.length
        if proposer in ORACLES:  # all its codes are accepted
            full, rest = divmod(TARGET.length - 1, most)
            assert sample.accepted == [1] + [most] * full + [rest] * (rest > 0)


@every_proposer
@every_cfg
def test_greedy_exact_is_plain_ar_code_by_code(proposer, cfg):
    plain = codes(draw("none", "exact", "greedy", cfg, 1))
    assert codes(draw(proposer, "exact", "greedy", cfg, 2)) == plain


@every_cfg
@pytest.mark.parametrize("sampling", ["greedy", "T=1"])
@pytest.mark.parametrize("proposer", ["tree", "eagle2", "independent", "jacobi maximal mixed"])
def test_the_toy_drafters_are_neither_always_right_nor_always_wrong(proposer, sampling, cfg):
    drawn = draw(proposer, "exact", sampling, cfg, 2)
    passes = [len(sample.accepted) for sample in drawn]
    length = len(drawn[0].codes)
    assert all(math.ceil((length - 1) / 6) + 1 < n for n in passes), "the drafter is always right"
    assert any(n < length for n in passes), "the drafter is always wrong"
    assert len({tuple(c) for c in codes(drawn)}) > 1 and len(set(codes(drawn)[0])) > 2
