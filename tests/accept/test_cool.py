"""Relaxed rules: COOL-SD, the two residuals, and the total variation they spend, against plain enumeration."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.distributions import chi_square
from helpers.refusals import rejects
from helpers.toys import ToyTarget, eagle, neighbours

from lanternpp.accept import RULES as NAMED
from lanternpp.accept.base import Acceptance, Dials
from lanternpp.accept.exact import Exact
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.accept.scaled import Cool
from lanternpp.accept.variation import tv_cost
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.tokenwise import verify_tokenwise
from lanternpp.errors import InputError
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.chain import chain_tree
from lanternpp.trees.dynamic import DynamicTree
from lanternpp.trees.shapes import EAGLE
from lanternpp.trees.static import StaticTree
from lanternpp.types import Draft

VOCAB = 7
torch.manual_seed(0)
TABLE = neighbours(torch.randn(VOCAB, 2), 4)


def distributions(count: int, power: float, zeros: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(10 * power))
    p = torch.rand(count, VOCAB, dtype=torch.float64, generator=generator).pow(power)
    p[p < zeros] = 0
    p[:, 0] += 1e-3
    return p / p.sum(-1, keepdim=True)


P = torch.cat((distributions(60, 3.0), distributions(60, 2.0, 0.2)))
Q = torch.cat((distributions(60, 4.0, 0.1), distributions(60, 1.0)))
MAKE = {
    "lantern 0.2": lambda residual: Lantern(TABLE, 0.2, residual),
    "lantern 0.6": lambda residual: Lantern(TABLE, 0.6, residual),
    "lantern 1": lambda residual: Lantern(TABLE, 1.0, residual),
    "lantern++ 2": lambda residual: LanternPlusPlus(TABLE, 2.0, residual),
    "lantern++ 9": lambda residual: LanternPlusPlus(TABLE, 9.0, residual),
    "cool 0.6": lambda residual: Cool(0.6, 0.3, residual),
    "cool 2": lambda residual: Cool(2.0, 0.3, residual),
    "cool 2, level 4": lambda residual: Cool(2.0, 0.3, residual).at(4),
}
every_rule = pytest.mark.parametrize("rule", MAKE)
both = pytest.mark.parametrize("residual", ["paper", "optimal"])


def one_child(rule: Acceptance, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The distribution of one judged child, code by code from `relax` and `residual`: one row p, q [V]."""
    distribution = torch.zeros_like(p)
    for x in range(len(p)):
        if q[x] > 0:
            code = torch.tensor([x])
            bent = rule.relax(p[None], code)
            accept = min(1.0, float(bent[0, x] / q[x]))
            distribution[x] += q[x] * accept
            distribution += q[x] * (1 - accept) * rule.residual(p[None], bent, q[None], code)[0]
    return distribution


def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).abs().sum(-1) / 2


@every_rule
@both
def test_spent_is_the_distance_of_the_enumerated_distribution(rule, residual):
    made = MAKE[rule](residual)
    enumerated = torch.stack([one_child(made, p, q) for p, q in zip(P, Q, strict=True)])
    assert torch.allclose(enumerated.sum(-1), torch.ones(len(P)).double())
    assert torch.allclose(made.output_distribution(P, Q), enumerated, atol=1e-12)
    assert torch.allclose(tv_cost(made, P, Q), distance(enumerated, P), atol=1e-12)


@every_rule
@both
def test_the_fast_forms_agree_with_the_general_ones(rule, residual):
    made = MAKE[rule](residual)
    own = torch.where(Q > 0, made.accept_mass(P, Q), 0)
    assert torch.allclose(own, torch.where(Q > 0, Acceptance.accept_mass(made, P, Q), 0), atol=1e-12)
    assert torch.allclose(
        tv_cost(made, P, Q), distance(Acceptance.output_distribution(made, P, Q), P), atol=1e-12
    )
    single = tv_cost(made, P.float(), Q.float())
    assert torch.allclose(single.double(), tv_cost(made, P, Q), atol=1e-5)


@every_rule
def test_optimal_is_never_further_from_p_than_paper_and_never_than_q(rule):
    """For one child they are even equal: what the papers' residual leaves out, acceptance has overspent."""
    best, paper = tv_cost(MAKE[rule]("optimal"), P, Q), tv_cost(MAKE[rule]("paper"), P, Q)
    assert (best <= paper + 1e-12).all() and (best <= distance(P, Q) + 1e-12).all()
    assert torch.allclose(best, paper, atol=1e-12) or rule in ("cool 0.6", "cool 2, level 4")


@every_rule
def test_no_other_correction_of_the_same_acceptance_is_nearer(rule):
    """The distance can be no less than the mass let out beyond p, whatever is drawn after a refusal."""
    made = MAKE[rule]("optimal")
    beyond = (torch.minimum(Q, Acceptance.accept_mass(made, P, Q)) - P).clamp(min=0).sum(-1)
    assert torch.allclose(tv_cost(made, P, Q), beyond, atol=1e-12)


def judged(rule, p, q, children, draws, sampling=None, dtype=torch.float64):
    """One node with `children` children drawn from q, through `verify`: the codes decided and what it cost."""
    sampling = sampling or Sampling()
    noise = Noise(torch.arange(draws), torch.ones(draws, dtype=torch.int64))
    builder = StaticTree(tuple((i,) for i in range(children)))
    draft = builder.grow(
        torch.zeros(draws, dtype=torch.int64),
        q.to(dtype).expand(draws, -1),
        lambda at: None,
        lambda rows, count, level: sampling.children(rows, count, noise, Noise.DRAFT + level),
    )
    logits = p.to(dtype).log().expand(draws, children + 1, -1)
    verdict = verify_tokenwise(draft, logits, sampling, rule, noise, measure_tv=True)
    return verdict.next_codes[:, 0], verdict.tv_cost


@every_rule
@both
def test_a_round_of_one_child_costs_what_verify_says(rule, residual):
    made = MAKE[rule](residual)
    if "level" in rule:
        made = MAKE["cool 2"](residual)  # `verify` sets the level itself
    p, q = P[3], Q[3]
    codes, spent = judged(made, p, q, 1, 20_000)
    enumerated = one_child(made, p, q)
    assert chi_square(codes.bincount(minlength=VOCAB), enumerated) > 1e-3
    assert spent[:, 0].min() == spent[:, 0].max() and not spent[:, 1].any()
    assert spent[0, 0].item() == pytest.approx(distance(enumerated, p).item())


@both
@pytest.mark.parametrize("rule", ["lantern 0.6", "lantern++ 9", "cool 2"])
def test_a_point_mass_costs_the_mass_it_gains(rule, residual):
    made, code = MAKE[rule](residual), 2
    point = torch.zeros_like(P)
    point[:, code] = 1
    gained = made.relax(P, torch.full((len(P),), code))[:, code] - P[:, code]
    assert torch.allclose(tv_cost(made, P, point), gained, atol=1e-12)


def test_a_greedy_choice_costs_one_where_it_is_not_the_most_probable():
    draft = Draft(chain_tree(2, 2, torch.device("cpu")), torch.tensor([[0, 1, 2], [0, 0, 3]]), None)
    p = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0]).double()
    table = torch.tensor([[1], [0], [0], [0], [0], [0], [0]])
    noise = Noise(torch.arange(2), torch.ones(2, dtype=torch.int64))
    rule = Lantern(table, 0.5)
    verdict = verify_tokenwise(draft, p.log().expand(2, 3, -1), Sampling(0), rule, noise, measure_tv=True)
    assert verdict.kept.tolist() == [3, 3]
    assert verdict.tv_cost.tolist() == [[1, 1, 0], [0, 1, 0]]


# COOL-SD.


def test_cool_accepts_with_the_weight_of_its_level():
    rule = Cool(1.5, 0.4)
    for level in range(4):
        weight = 1.5 * math.exp(-0.4 * level)
        for x in range(VOCAB):
            code = torch.full((len(P),), x)
            bent = rule.at(level).relax(P, code)
            assert torch.allclose(bent.sum(-1), torch.ones(len(P)).double())
            assert torch.allclose(bent[:, x], (weight * P[:, x]).clamp(max=1))
            others = [y for y in range(VOCAB) if y != x]
            assert torch.allclose(
                bent[:, others] * P[:, others].sum(-1, keepdim=True),
                P[:, others] * bent[:, others].sum(-1, keepdim=True),
            )


def test_cool_takes_only_what_makes_sense():
    assert NAMED["cool"] is Cool
    dials = Dials(lambda k: TABLE, delta=1.2, nu=0.1, residual="paper")
    made = Cool.build(dials)
    assert (made.delta, made.nu, made.optimal_residual) == (1.2, 0.1, False)
    assert Cool.build(Dials(lambda k: TABLE, delta=1.2)).optimal_residual
    rejects("needs delta", Cool.build, Dials(lambda k: TABLE))
    for wrong in ((0.0,), (-1.0,), (math.nan,), (1.0, -0.1), (1.0, math.nan), (1.0, 0.0, "best")):
        with pytest.raises(InputError):
            Cool(*wrong)


def test_a_residual_is_asked_for_by_name():
    for name in ("lantern", "lantern++"):
        dials = {"neighbours": 4, "delta": 0.2, "lam": 2.0}
        build = NAMED[name].build
        assert not build(Dials(lambda k: TABLE, **dials)).optimal_residual
        assert build(Dials(lambda k: TABLE, **dials, residual="optimal")).optimal_residual
        rejects("paper, optimal", build, Dials(lambda k: TABLE, **dials, residual="none"))


# Through the engine.


def finished(target, rule, builder, sampling, batch, measure_tv=True):
    engine = Engine(
        target, TreeProposer(eagle(target), builder), rule, sampling, Guidance(3.0), batch, measure_tv
    )
    return generate(engine, ["a", "sea", None, "hill"], [3, 1, 4, 5])


@pytest.mark.parametrize(
    "tree", [lambda: StaticTree(EAGLE), lambda: DynamicTree(5, 4, 20)], ids=["static", "eagle2"]
)
@both
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0)], ids=["T=1", "greedy"])
def test_a_picture_carries_what_it_cost_and_measuring_changes_nothing(tree, residual, sampling):
    target = ToyTarget(grid=3)
    table = neighbours(target.codebook, 5)
    for rule in (
        Lantern(table, 0.4, residual),
        LanternPlusPlus(table, 4.0, residual),
        Cool(1.7, 0.1, residual),
    ):
        four = finished(target, rule, tree(), sampling, 4)
        alone = finished(target, rule, tree(), sampling, 1)
        quiet = finished(target, rule, tree(), sampling, 4, measure_tv=False)
        assert [h.codes.tolist() for h in four] == [h.codes.tolist() for h in quiet]
        assert [h.accepted for h in four] == [h.accepted for h in alone] == [h.accepted for h in quiet]
        assert [h.tv_cost for h in four] == pytest.approx([h.tv_cost for h in alone], abs=1e-5)
        assert [h.tv_cost for h in quiet] == [None] * 4
        assert all(h.tv_cost >= 0 for h in four)
        if not isinstance(rule, Cool) or not sampling.greedy:
            assert sum(h.tv_cost for h in four) > 0


def test_the_exact_rule_reports_zero_measured_or_not():
    target = ToyTarget(grid=3)
    for measure_tv in (False, True):
        assert [
            h.tv_cost for h in finished(target, Exact(), StaticTree(EAGLE), Sampling(), 4, measure_tv)
        ] == [0.0] * 4
    engine = Engine(
        target, NoDraft(), Lantern(neighbours(target.codebook, 5), 0.4), Sampling(), Guidance(), 1, True
    )
    assert generate(engine, ["a"], [1])[0].tv_cost == 0.0
