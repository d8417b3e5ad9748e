"""Every proposer with every rule, sampling and guidance. A new proposer, tree or rule adds one row here."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import pytest
import torch
from helpers.toys import OracleDrafter, ToyTarget, eagle, neighbours, parallel, smaller

from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Exact
from lanternpp.accept.mixture import DraftMixture
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.accept.scaled import Cool
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine, FinishedSample
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.choose import VERIFIERS
from lanternpp.proposers.draft_model import DraftModel
from lanternpp.proposers.jacobi import Jacobi
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.parallel import Parallel
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.dynamic import DepthTree, DynamicTree
from lanternpp.trees.shapes import EAGLE, chain
from lanternpp.trees.static import StaticTree

PROPOSERS = {
    "none": lambda target: NoDraft(),
    "eagle chain": lambda target: TreeProposer(eagle(target), StaticTree(chain(4))),
    "eagle tree": lambda target: TreeProposer(eagle(target), StaticTree(EAGLE)),
    "oracle chain": lambda target: TreeProposer(OracleDrafter(target), StaticTree(chain(4))),
    "oracle tree": lambda target: TreeProposer(OracleDrafter(target), StaticTree(EAGLE)),
    "eagle2": lambda target: TreeProposer(eagle(target), DynamicTree(4, 3, 12)),
    "ddd": lambda target: TreeProposer(eagle(target), DepthTree(3, 4, 10, 1, math.log(0.7))),
    "parallel chain": lambda target: Parallel(parallel(target), StaticTree(chain(4))),
    "parallel tree": lambda target: Parallel(parallel(target, 2), StaticTree(BUSHY)),
    "parallel aux chain": lambda target: Parallel(parallel(target, 13, (0,)), StaticTree(chain(12))),
    "parallel eagle2": lambda target: Parallel(parallel(target), DynamicTree(3, 3, 9)),
    "independent chain": lambda target: DraftModel(smaller(target), StaticTree(chain(4))),
    "independent tree": lambda target: DraftModel(smaller(target), StaticTree(BUSHY)),
    "independent eagle2": lambda target: DraftModel(smaller(target), DynamicTree(3, 3, 9)),
    "independent oracle": lambda target: DraftModel(target, StaticTree(BUSHY)),
    "jacobi": lambda target: Jacobi(5),
    "jacobi maximal last": lambda target: Jacobi(5, "maximal", "last"),
    "jacobi gumbel above": lambda target: Jacobi(5, "gumbel", "above"),
    "jacobi maximal mixed": lambda target: Jacobi(5, "maximal", "mixed"),
    "jacobi siblings": lambda target: Jacobi(4, "maximal", "mixed", 2),
    "jacobi rows": lambda target: Jacobi(3, "maximal", "mixed", 1, 2),
}
BUSHY = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1))
OTHERWISE = {  # the same drafts, not verified by a walk: name and verifier, parted by a comma
    f"{name}, {verify}": PROPOSERS[name]
    for verify, names in {
        "block": ("oracle chain", "parallel chain", "parallel aux chain", "jacobi", "jacobi maximal mixed"),
        "traversal": ("oracle tree", "parallel tree", "independent tree", "jacobi siblings", "jacobi rows"),
    }.items()
    for name in names
}
ORACLES = [
    "oracle chain",
    "oracle tree",
    "independent oracle",
    "oracle chain, block",
    "oracle tree, traversal",
]  # the drafter is the target: all must be kept
RULES = {
    "exact": lambda target: Exact(),
    "lantern": lambda target: Lantern(neighbours(target.codebook, 5), 0.3),
    "lantern optimal": lambda target: Lantern(neighbours(target.codebook, 5), 0.3, "optimal"),
    "lantern++": lambda target: LanternPlusPlus(neighbours(target.codebook, 8), 10.0),
    "lantern++ optimal": lambda target: LanternPlusPlus(neighbours(target.codebook, 8), 10.0, "optimal"),
    "cool": lambda target: Cool(2.6, 0.2),  # above 1 at every level here: below it, even an oracle is refused
    "cool paper": lambda target: Cool(2.6, 0.2, "paper"),
    "mixture": lambda target: DraftMixture(0.3, 0.2),
}
WAYS_TO_DRAW = [
    "eagle chain",
    "eagle tree",
    "eagle2",
    "parallel tree",
    "independent eagle2",
    *(p for p in PROPOSERS if "jacobi" in p),
]
WARPED = ["eagle2", "parallel tree", "jacobi siblings"]  # those of them that rules meet at other samplings
OTHER_RESIDUALS = ["lantern optimal", "lantern++ optimal", "cool paper"]  # they differ only in what is drawn
EXACT = {  # rules that must be exact, whatever they are called
    "exact": RULES["exact"],
    "lantern, delta 0": lambda target: Lantern(neighbours(target.codebook, 5), 0.0),
    "lantern++, lambda 1": lambda target: LanternPlusPlus(neighbours(target.codebook, 5), 1.0),
    "cool, delta 1": lambda target: Cool(1.0),
}
SAMPLINGS = {"greedy": Sampling(0), "T=1": Sampling(), "T=0.8, k=6, p=0.9": Sampling(0.8, 6, 0.9)}
CFG = [1.0, 3.0]
CONDITIONS = [
    "a",
    None,
    "hill",
]  # toy prompts differ with the word's length: the first is padded, the last is not
SEEDS = [3, 4, 1 << 40]

every_proposer = pytest.mark.parametrize("proposer", PROPOSERS)
every_cfg = pytest.mark.parametrize("cfg", CFG)


def combinations():
    """Every proposer, rule, sampling and guidance, but for those that add nothing to the others.

    A rule sees probabilities, which guidance and top-k made before, and a draft's children. So the exact rule meets every
    sampling under guidance and one without; the others meet every proposer at T=1 under guidance, and other samplings with a few ways to
    draw children. Plain decoding asks no rule, and the papers' residuals are of token-wise verification.
    """
    for proposer, rule, sampling, cfg in product(PROPOSERS, RULES, SAMPLINGS, CFG):
        if rule == "exact":
            fits = cfg == 3 or sampling == "T=1"
        elif rule == "mixture":
            fits = cfg == 3 and sampling == "T=1" and "chain" in proposer
        elif proposer in WAYS_TO_DRAW:
            fits = cfg == 3 and (sampling == "T=1" or (proposer in WARPED and rule not in OTHER_RESIDUALS))
        else:
            fits = cfg == 3 and sampling == "T=1" and rule not in OTHER_RESIDUALS and proposer != "none"
        if fits:
            yield proposer, rule, sampling, cfg
    for proposer, rule in product(
        OTHERWISE, ("exact", "lantern optimal", "lantern++ optimal", "cool", "mixture")
    ):
        yield proposer, rule, "T=0.8, k=6, p=0.9" if rule == "exact" else "T=1", 3.0


@cache
def draw(proposer: str, rule: str, sampling: str, cfg: float, batch: int) -> list[FinishedSample]:
    """The conditions, through the whole loop."""
    model = ToyTarget(grid=3)
    acceptance: Acceptance = {**RULES, **EXACT}[rule](model)
    parts = (PROPOSERS | OTHERWISE)[proposer](model), acceptance, SAMPLINGS[sampling], Guidance(cfg), batch
    verifier = VERIFIERS[proposer.partition(", ")[2] or "token"]
    return generate(Engine(model, *parts, verifier=verifier), CONDITIONS, SEEDS)


def codes(samples: list[FinishedSample]) -> list[list[int]]:
    return [h.codes.tolist() for h in samples]


@pytest.mark.parametrize(("proposer", "rule", "sampling", "cfg"), list(combinations()))
def test_neither_the_batch_nor_when_a_sample_enters_matters_and_passes_add_up(proposer, rule, sampling, cfg):
    alone = draw(proposer, rule, sampling, cfg, 1)
    together = draw(proposer, rule, sampling, cfg, 2)  # the last one enters as another leaves
    assert codes(together) == codes(alone)
    assert [h.accepted for h in together] == [h.accepted for h in alone]
    model = ToyTarget(grid=3)
    most = (PROPOSERS | OTHERWISE)[proposer](model).depth + 1
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


@pytest.mark.parametrize(
    ("proposer", "sampling"),
    [*product([*WAYS_TO_DRAW, *OTHERWISE], ["T=1"]), *product(WARPED, ["greedy", "T=0.8, k=6, p=0.9"])],
)
@pytest.mark.parametrize("rule", list(EXACT)[1:])
def test_a_budget_of_nothing_is_the_exact_rule(proposer, rule, sampling):
    exact = draw(proposer, "exact", sampling, 3.0, 2)
    assert codes(draw(proposer, rule, sampling, 3.0, 2)) == codes(exact)


@every_cfg
@pytest.mark.parametrize("sampling", ["greedy", "T=1"])
@pytest.mark.parametrize("proposer", ["eagle tree", "eagle2", "independent tree", "jacobi maximal mixed"])
def test_the_toys_can_tell_right_from_wrong(proposer, sampling, cfg):
    drawn = draw(proposer, "exact", sampling, cfg, 2)
    passes = [len(h.accepted) for h in drawn]
    length = len(drawn[0].codes)
    assert all(math.ceil((length - 1) / 6) + 1 < n for n in passes), (
        "a drafter that is always right tests nothing"
    )
    assert any(n < length for n in passes), "a drafter that is always wrong tests nothing"
    assert len({tuple(c) for c in codes(drawn)}) > 1 and len(set(codes(drawn)[0])) > 2


def test_relaxed_rules_keep_more_than_the_exact_one():
    model = ToyTarget(grid=3)

    def passes(rule):
        engine = Engine(model, PROPOSERS["eagle tree"](model), RULES[rule](model), Sampling(), Guidance(), 6)
        return sum(len(h.accepted) for h in generate(engine, CONDITIONS * 4, range(12)))

    assert passes("lantern") < passes("exact") and passes("lantern++") < passes("exact")


@every_cfg
def test_guidance_and_the_prompt_reach_the_picture(cfg):
    first = codes(draw("none", "exact", "T=1", cfg, 2))
    assert len({tuple(c) for c in first}) == len(CONDITIONS)
    other = CFG[1 - CFG.index(cfg)]
    assert codes(draw("none", "exact", "T=1", other, 2))[0] != first[0]


@pytest.mark.parametrize("proposer", ["none", "eagle2", "parallel tree", "independent tree", "jacobi"])
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
