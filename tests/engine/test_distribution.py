"""The distribution of what is drawn: the target's own for exact rules, the enumerated one for relaxed rules."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.distributions import (
    additive,
    chi_square,
    drawn,
    multiplicative,
    no_relax,
    point_round_distribution,
    round_distribution,
    tally,
)
from helpers.toys import (
    BRANCHING,
    CHAIN,
    FAR,
    HOLES,
    MarkovTarget,
    OtherMarkovDrafter,
    admit_all,
    counts,
    engine_of,
    noise,
    parallel,
)

from lanternpp.accept.exact import Exact
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.tokenwise import verify_tokenwise
from lanternpp.proposers.draft_model import DraftModel
from lanternpp.proposers.jacobi import Jacobi
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.parallel import Parallel
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.dynamic import DynamicTree
from lanternpp.trees.static import StaticTree, chain, chain_tree
from lanternpp.types import Draft

DRAWS, FEWER_DRAWS, PICTURES = 100_000, 50_000, 20_000  # fewer: for one of many similar cases
# Factors of PICTURES for the cases in which an error of a tenth in q changes too little to show in 20,000.
TIMES = {"chain, flatter q": 3, "tree, flatter q": 3, "tree": 3, "independent tree": 3, "jacobi maximal": 10}
UNLIKELY = 1e-3  # the seeds are fixed: a test passes always or never

ALL_CODES = ((0,), (1,), (2,), (0, 0), (1, 0), (2, 0), (2, 1))
FLATTER = CHAIN.sqrt()
TOKEN, BLOCK, BOTH = ("token",), ("block",), ("token", "traversal")


def drafted(table, builder):
    """Drafts of a Markov chain."""
    return lambda target: TreeProposer(OtherMarkovDrafter(target, table), builder)


def of_a_target(table, builder):
    """Drafts of another target."""
    return lambda target: DraftModel(MarkovTarget(table), builder)


SHALLOW = DynamicTree(2, 3, 6, 1, math.log(0.9))
CASES = {  # verifiers, drafts
    "none": (TOKEN, lambda target: NoDraft()),
    "chain, flatter q": (("token", "block"), drafted(FLATTER, StaticTree(chain(2)))),
    "tree, flatter q": (("traversal",), drafted(FLATTER, StaticTree(BRANCHING))),
    "all levels at once": (BOTH, lambda t: Parallel(parallel(t), StaticTree(BRANCHING))),
    "fewer codes than children": (BOTH, drafted(HOLES, StaticTree(ALL_CODES))),
    "chain, q with holes": (BLOCK, drafted(HOLES, StaticTree(chain(3)))),
    "chain, all levels at once": (BLOCK, lambda t: Parallel(parallel(t), StaticTree(chain(3)))),
    "a chain longer than the picture, and layers of the target": (
        BLOCK,
        lambda t: Parallel(parallel(t, 4, (0,)), StaticTree(chain(6))),
    ),
    "all codes of a dynamic tree": (TOKEN, drafted(FAR, DynamicTree(3, 2, 9))),
    "dynamic tree, flatter q": (TOKEN, drafted(FLATTER, DynamicTree(2, 3, 5))),
    "dynamic tree, q with holes": (TOKEN, drafted(HOLES, DynamicTree(2, 3, 5))),
    "dynamic depth": (TOKEN, drafted(FAR, SHALLOW)),
    "independent chain": (TOKEN, of_a_target(HOLES, StaticTree(chain(2)))),
    "independent tree": (TOKEN, of_a_target(FAR, StaticTree(BRANCHING))),
    "independent, dynamic depth": (TOKEN, of_a_target(FAR, SHALLOW)),
    "jacobi": (BLOCK, lambda t: Jacobi(3, "none", "mixed")),
    "jacobi uniform": (TOKEN, lambda t: Jacobi(2)),
    "jacobi maximal": (TOKEN, lambda t: Jacobi(2, "maximal")),
    # `test_jacobi_exact.py` enumerates the other couplings.
    # From other initial codes it draws the same ones.
    "gumbel above": (TOKEN, lambda t: Jacobi(2, "gumbel", "above")),
    "gumbel mixed": (TOKEN, lambda t: Jacobi(2, "gumbel", "mixed", 2)),
}


def pictures(case: str) -> int:
    """How many pictures of a case are drawn."""
    return PICTURES * (10 if "gumbel" in case else TIMES.get(case, 1))


@pytest.mark.parametrize(
    ("case", "verifier"), [(case, verifier) for case, row in CASES.items() for verifier in row[0]]
)
def test_pictures_follow_the_targets_distribution_however_a_draft_is_verified(case, verifier):
    target = MarkovTarget(CHAIN)
    engine = engine_of(target, CASES[case][1](target), PICTURES, verify=verifier)
    assert chi_square(counts(engine, 4, pictures(case)), target.distribution()) > UNLIKELY


WARPED_PROPOSERS = {
    "tree": drafted(FLATTER, StaticTree(BRANCHING)),
    "jacobi maximal": lambda target: Jacobi(4, "maximal", "mixed"),  # wider than the picture
    "jacobi gumbel": lambda target: Jacobi(4, "gumbel", "mixed"),
}


@pytest.mark.parametrize("proposer", WARPED_PROPOSERS)
def test_pictures_follow_the_distribution_after_temperature_and_top_k(proposer):
    target, sampling = MarkovTarget(CHAIN), Sampling(0.7, top_k=2)
    warped = MarkovTarget(sampling.probs(CHAIN.log()))
    engine = engine_of(target, WARPED_PROPOSERS[proposer](target), PICTURES, sampling)
    assert chi_square(counts(engine, 4, 3 * PICTURES), warped.distribution()) > UNLIKELY


@pytest.mark.parametrize("case", ["tree, flatter q", "independent tree", "jacobi maximal"])
def test_the_toy_admission_is_the_engines_own(case):
    target, seeds = MarkovTarget(CHAIN), [5, 6, 7, 8]
    ours, theirs = (engine_of(target, CASES[case][1](target), 4) for _ in range(2))
    admit_all(ours, torch.tensor(seeds))
    for slot, seed in enumerate(seeds):
        theirs.admit(slot, "sea", seed)
    for _ in range(3):
        ours.step()
        theirs.step()
    assert torch.equal(ours.codes[:, :4], theirs.codes[:, :4])
    assert torch.equal(ours.accepted, theirs.accepted)


# One node and its children, straight through `verify_tokenwise`.

P = [0.41, 0.24, 0.19, 0.16]  # no sum of these equals a budget below
QS = {
    "near": [0.3, 0.3, 0.2, 0.2],
    "far": [0.05, 0.05, 0.1, 0.8],
    "equal": P,
    "with zeros": [0.0, 0.6, 0.4, 0.0],
    "a point": [0.0, 0.0, 1.0, 0.0],
}
NEAR = [[1, 2, 3], [2, 0, 3], [3, 1, 0], [2, 1, 0]]
TABLE = torch.tensor(NEAR, dtype=torch.int32)
RULES = {
    "exact": (Exact(), no_relax),
    "lantern 0.22": (Lantern(TABLE, 0.22), additive(NEAR, 0.22)),
    "lantern 0.5": (Lantern(TABLE, 0.5), additive(NEAR, 0.5)),
    "lantern 0.5 optimal": (Lantern(TABLE, 0.5, "optimal"), additive(NEAR, 0.5)),
    "lantern++ 1.7": (LanternPlusPlus(TABLE, 1.7), multiplicative(NEAR, 1.7)),
    "lantern++ 4": (LanternPlusPlus(TABLE, 4.0), multiplicative(NEAR, 4.0)),
    "lantern++ 4 optimal": (LanternPlusPlus(TABLE, 4.0, "optimal"), multiplicative(NEAR, 4.0)),
}


def verdict_of(children, codes, probs, p, rule, sampling=None):
    """A root and `children` children, codes [B, N] and probs [B, N, V], where the target says p [V] or [B, N, V]: verified token by token."""
    draws, cpu = len(codes), torch.device("cpu")
    draft = Draft(chain_tree(draws, 1, cpu, children - 1), codes, probs)
    logits = p.log().expand(draws, children + 1, -1)
    return verify_tokenwise(draft, logits, sampling or Sampling(), rule, noise(draws))


def round_codes(rule, p, q, children, draws=DRAWS, dtype=torch.float64):
    """The code that a round decides after the root, [draws], its children drawn without replacement."""
    row = torch.tensor(q, dtype=dtype).expand(draws, 1, -1)
    codes = torch.cat((torch.zeros(draws, 1, dtype=torch.int64), drawn(row[:, 0], children)), 1)
    probs = row.expand(-1, children + 1, -1)
    return verdict_of(children, codes, probs, torch.tensor(p, dtype=dtype), rule).next_codes[:, :1]


@pytest.mark.parametrize("children", [1, 2, 3])
@pytest.mark.parametrize("q", QS)
@pytest.mark.parametrize("rule", RULES)
def test_a_round_follows_its_enumerated_distribution(rule, q, children):
    ours, reference = RULES[rule]
    distribution = torch.tensor(
        round_distribution(P, QS[q], children, reference, ours.optimal_residual), dtype=torch.float64
    )
    assert distribution.sum().item() == pytest.approx(1)
    draws = DRAWS if rule == "exact" and children > 1 else FEWER_DRAWS
    if ours.lossless:
        assert distribution.tolist() == pytest.approx(P)
    elif (q, children) == ("near", 2) and rule in ("lantern 0.5", "lantern++ 4"):
        assert (distribution - torch.tensor(P)).abs().max() > 0.01, "the rule changes the distribution"
    assert chi_square(tally(round_codes(ours, P, QS[q], children, draws), 4), distribution) > UNLIKELY


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("children", [(2,), (3, 0), (1, 0, 2)])
def test_point_mass_drafts_follow_their_enumerated_distribution(rule, children):
    ours, reference = RULES[rule]
    codes = torch.tensor((0, *children)).expand(FEWER_DRAWS, -1)
    made = verdict_of(len(children), codes, None, torch.tensor(P).double(), ours).next_codes[:, :1]
    distribution = torch.tensor(
        point_round_distribution(P, children, reference, ours.optimal_residual), dtype=torch.float64
    )
    if ours.lossless:
        assert distribution.tolist() == pytest.approx(P)
    assert chi_square(tally(made, 4), distribution) > UNLIKELY


def test_single_precision_follows_the_distribution_too():
    made = round_codes(Exact(), P, QS["far"], 3, dtype=torch.float32)
    assert chi_square(tally(made, 4), torch.tensor(P)) > UNLIKELY


def test_a_child_of_drafted_probability_0_is_never_accepted():
    codes = torch.tensor([0, 3]).expand(1000, -1)
    q = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64).expand(1000, 2, -1)
    for sampling in (Sampling(), Sampling(0)):
        assert verdict_of(1, codes, q, torch.tensor(P).double(), Exact(), sampling).kept.max() == 1


def test_a_child_of_probability_0_does_not_stop_the_next_one():
    """Alone, no child of the first rank is tried; beside a sample that accepts its first child, none of the second."""
    codes = torch.tensor([[0, 1, 2], [0, 1, 2]])
    q = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.5, 0.0]], dtype=torch.float64)
    p = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    for rows, paths in (([0, 1], [[0, 2], [0, 1]]), ([0], [[0, 2]]), ([1], [[0, 1]])):
        probs = q[rows, None].expand(-1, 3, -1)
        verdict = verdict_of(2, codes[rows], probs, p[rows, None].expand(-1, 3, -1), Exact())
        assert verdict.path.tolist() == paths
