from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from helpers.distributions import additive, multiplicative
from helpers.refusals import rejects

from lanternpp.accept import RULES as NAMED
from lanternpp.accept import neighbours
from lanternpp.accept.base import RESIDUALS, Acceptance, Dials, has_fast_distribution, tv_cost
from lanternpp.accept.exact import Exact
from lanternpp.accept.mixture import DraftMixture
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.accept.scaled import Cactus, Cool
from lanternpp.api.options import DIALS, RuleDials, names

VOCAB, K = 40, 12
GENERATOR = torch.Generator().manual_seed(0)
TABLE = torch.stack([torch.randperm(VOCAB - 1, generator=GENERATOR)[:K] for _ in range(VOCAB)])
TABLE = (TABLE + (TABLE >= torch.arange(VOCAB)[:, None])).int()  # never the code itself
DELTAS = [0.0, 0.05, 0.2, 0.6, 1.0]
LAMBDAS = [1.0, 1.5, 3.0, 20.0]


def distributions(count: int, sharp: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(sharp * 10))
    return (torch.randn(count, VOCAB, dtype=torch.float64, generator=generator) * sharp).softmax(-1)


P = torch.cat(
    (distributions(40, 0.1), distributions(40, 1.0), distributions(40, 4.0), torch.eye(VOCAB).double())
)
CODE = torch.arange(len(P)) * 7 % VOCAB
RULES = {f"delta {d}": (Lantern(TABLE, d), additive(TABLE.tolist(), d)) for d in DELTAS} | {
    f"lambda {lam}": (LanternPlusPlus(TABLE, lam), multiplicative(TABLE.tolist(), lam)) for lam in LAMBDAS
}
every_rule = pytest.mark.parametrize("rule", RULES)


@every_rule
def test_relax_is_that_of_the_paper(rule):
    ours, reference = RULES[rule]
    for p, x, relaxed in zip(P.tolist(), CODE.tolist(), ours.relax(P, CODE), strict=True):
        assert relaxed.tolist() == pytest.approx(reference(p, x), abs=1e-12)


def test_lantern_pp_never_accepts_a_code_of_probability_0():
    p = distributions(1, 1.0)
    p[0, 3] = 0
    assert LanternPlusPlus(TABLE, 1e6).relax(p, torch.tensor([3]))[0, 3] == 0
    assert Lantern(TABLE, 0.5).relax(p, torch.tensor([3]))[0, 3] > 0


@pytest.mark.parametrize("delta", [0.9, 1.0])  # 1 lets LANTERN accept everything
@pytest.mark.parametrize("name", NAMED)
def test_a_code_the_format_forces_is_never_relaxed(name, delta):
    for residual in RESIDUALS:
        given = {"neighbours": 12, "delta": delta, "lam": 1e9, "nu": 0.1, "residual": residual}
        others = {name: DIALS[name].slider[1] for name in names(RuleDials) if name not in given}
        dials = Dials(lambda k: TABLE[:, :k], **given, **others)
        rule, forced = NAMED[name].build(dials), torch.eye(VOCAB).double()
        for x in range(VOCAB):
            for at in (rule.at(0), rule.at(3)):
                assert torch.equal(at.relax(forced, torch.full((VOCAB,), x)), forced)
        assert tv_cost(rule, forced, distributions(VOCAB, 0.1)).max() < 1e-12


ZERO_BUDGET = [Exact(), Lantern(TABLE, 0.0), LanternPlusPlus(TABLE, 1.0), Cactus(0.0), DraftMixture(0.0)]


@pytest.mark.parametrize("rule", [*ZERO_BUDGET, Cool(1.0), Cool(0.6)], ids=lambda rule: type(rule).__name__)
def test_a_budget_of_0_changes_nothing(rule):
    q = distributions(len(P), 2.0)
    assert torch.allclose(rule.relax(P, CODE), P, atol=1e-15) or rule not in ZERO_BUDGET
    assert torch.allclose(rule.output_distribution(P, q), P, atol=1e-15)
    assert tv_cost(rule, P, q).max() < 1e-12


@pytest.mark.parametrize("delta", [1e-4, 1e-2, 0.3])
def test_cactus_keeps_within_its_divergence_where_a_code_stays_below_a_half(delta):
    rule = Cactus(delta, 0.7)
    for level in range(3):
        relaxed = rule.at(level).relax(P[:120], CODE[:120])
        at = CODE[:120, None]
        grown = relaxed.gather(1, at)[:, 0]
        divergence = (relaxed * (relaxed / P[:120]).log()).sum(-1)
        most = delta * math.exp(-0.7 * level)
        below = divergence[grown <= 0.5]
        assert (below <= most + 1e-12).all() and (below > most / 4).any()
        assert (grown >= P[:120].gather(1, at)[:, 0]).all()
        assert torch.allclose(relaxed.sum(-1), torch.ones(120).double())


def test_a_mixture_has_the_mixed_distribution_and_its_share_of_the_distance():
    q = distributions(len(P), 2.0)
    q[0, :30] = 0
    q[0] /= q[0].sum()
    for level, share in ((0, 0.3), (2, 0.3 * math.exp(-0.8))):
        rule, p, q = DraftMixture(0.3, 0.4).at(level), P[:120], q[:120]
        assert torch.allclose(rule.output_distribution(p, q), (1 - share) * p + share * q)
        assert torch.allclose(tv_cost(rule, p, q), share * (p - q).abs().sum(-1) / 2)
        assert torch.allclose(
            torch.minimum(rule.output_distribution(p, q), q), torch.minimum(rule.accept_mass(p, q), q)
        )


@pytest.mark.parametrize("name", ["lantern", "lantern++", "cool", "cactus", "mixture"])
def test_every_relaxation_can_fall_with_the_level(name):
    made = Dials(lambda k: TABLE[:, :k], neighbours=12, delta={"cool": 2.0}.get(name, 0.6), lam=3.0, nu=0.5)
    rule, p, q = NAMED[name].build(made), P[:120], distributions(120, 2.0)
    costs = [tv_cost(rule.at(level), p, q).mean() for level in range(5)]
    assert rule.at(0).relax(p, CODE[:120]).equal(rule.relax(p, CODE[:120]))
    assert all(b <= a for a, b in pairwise(costs)) and costs[4] < 0.6 * costs[0]
    levels = torch.arange(5).view(5, 1).expand(5, 120)
    together = rule.output_distributions(p.expand(5, -1, -1), q.expand(5, -1, -1), levels, 5)
    by_level = Acceptance.output_distributions(rule, p.expand(5, -1, -1), q.expand(5, -1, -1), levels, 5)
    assert torch.allclose(together, by_level, atol=1e-12)
    for level in range(5):
        assert torch.allclose(together[level], rule.at(level).output_distribution(p, q), atol=1e-12)
    flat = NAMED[name].build(Dials(**vars(made) | {"nu": None}))
    assert flat.at(3) is flat
    rejects("nu", NAMED[name].build, Dials(**vars(made) | {"nu": -1.0}))


def test_a_custom_rule_may_differ_by_level():
    class AtFirst(LanternPlusPlus):
        def at(self, level):
            return AtFirst(self.table, 1.0 if level else self.lam, "optimal")

    class OtherwiseExact(LanternPlusPlus):
        def at(self, level):
            return Exact() if level else self

    p, q, levels = P[:120], distributions(120, 2.0), torch.arange(3).view(3, 1).expand(3, 120)
    for kind in AtFirst, OtherwiseExact:
        rule = kind(TABLE, 5.0, "optimal")
        found = rule.output_distributions(p.expand(3, -1, -1), q.expand(3, -1, -1), levels, 3)
        assert (found[0] - p).abs().max() > 0.01
        assert torch.allclose(found[1:], p.expand(2, -1, -1), atol=1e-12)
    assert AtFirst(TABLE, 5.0).as_numbers(3).limits == ((0, 4), (0, 0), (0, 0))
    assert OtherwiseExact(TABLE, 5.0).as_numbers(3) is None
    assert OtherwiseExact(TABLE, 5.0).as_numbers(1).limits == ((0, 4),)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_subclass_with_its_own_relax_does_not_use_its_parents_formulas(residual):
    class Never(LanternPlusPlus):
        def relax(self, p, code):
            return p

    q, rule = distributions(len(P), 2.0), Never(TABLE, 50.0, residual)
    assert torch.equal(rule.accept_mass(P, q)[q > 0], P[q > 0])
    assert torch.allclose(rule.output_distribution(P, q), P, atol=1e-6)
    assert tv_cost(rule, P, q).max() < 1e-6 and not has_fast_distribution(rule)
    assert has_fast_distribution(LanternPlusPlus(TABLE, 50.0, "optimal"))


def test_all_neighbours_count_where_there_are_many(monkeypatch):
    """In chunks, and on a CPU the later ones only for codes whose budget is larger."""
    rule, q = Lantern(TABLE, 0.6), distributions(len(P), 1.0)
    mass, cost = torch.minimum(q, rule.accept_mass(P, q)), tv_cost(rule, P, q)
    monkeypatch.setattr(neighbours, "NUM_FIRST", 2)
    monkeypatch.setattr(neighbours, "CHUNK", 3)
    assert torch.allclose(torch.minimum(q, rule.accept_mass(P, q)), mass, atol=1e-15)
    assert torch.allclose(torch.minimum(q, Acceptance.accept_mass(rule, P, q)), mass, atol=1e-15)
    assert torch.allclose(tv_cost(rule, P, q), cost, atol=1e-15)


@every_rule
def test_an_empty_residual_is_the_relaxed_distribution_and_never_uniform(rule):
    ours = RULES[rule][0]
    relaxed = ours.relax(P, CODE)
    assert torch.equal(ours.residual(P, relaxed, relaxed.clone(), CODE), relaxed)


def test_cool_accepts_with_the_weight_of_its_level():
    rule = Cool(1.5, 0.4)
    for level in range(4):
        relaxed, before = rule.at(level).relax(P, CODE), P.gather(1, CODE[:, None])
        others = torch.ones_like(P).scatter(1, CODE[:, None], 0)
        after = (1.5 * math.exp(-0.4 * level) * before).clamp(max=1).where(before < 1, before)
        assert torch.allclose(relaxed.gather(1, CODE[:, None]), after)
        rest = (P * others / (1 - before)).where(before < 1, 0) * (1 - after)
        assert torch.allclose(relaxed * others, rest, atol=1e-15)


def test_a_rule_is_built_from_the_dials_that_it_reads():
    cool = NAMED["cool"].build(Dials(lambda k: TABLE, delta=1.2, nu=0.1, residual="paper"))
    assert (type(cool), cool.delta, cool.nu, cool.optimal_residual) == (Cool, 1.2, 0.1, False)
    assert Cool.build(Dials(lambda k: TABLE, delta=1.2)).optimal_residual
    rejects("needs delta", Cool.build, Dials(lambda k: TABLE))
    for name in ("lantern", "lantern++"):
        dials = {"neighbours": 4, "delta": 0.2, "lam": 2.0}
        build = NAMED[name].build
        assert not build(Dials(lambda k: TABLE, **dials)).optimal_residual
        assert build(Dials(lambda k: TABLE, **dials, residual="optimal")).optimal_residual
        rejects("paper, optimal", build, Dials(lambda k: TABLE, **dials, residual="none"))


def test_a_strength_out_of_range_is_rejected():
    for rule, wrong in ((Lantern, (-0.1, 1.1, math.nan)), (LanternPlusPlus, (0.9, -1.0, math.nan))):
        for strength in wrong:
            rejects(str(strength), rule, TABLE, strength)
    for given in ((0.0,), (-1.0,), (math.nan,), (1.0, -0.1), (1.0, math.nan)):
        rejects(str(given[-1]), Cool, *given)
