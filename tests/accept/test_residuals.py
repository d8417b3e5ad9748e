"""Nodes with several children, enumerated: what the two residuals cost, and what `spent` says of it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers.distributions import additive, multiplicative, round_distribution
from helpers.toys import neighbours

from lanternpp.accept.base import Acceptance
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.accept.scaled import Cool
from lanternpp.accept.variation import tv_cost
from lanternpp.engine.verify.tokenwise import without

CASES = 120
MAKE = {
    "lantern": lambda table, residual: Lantern(table, 0.4, residual),
    "lantern++": lambda table, residual: LanternPlusPlus(table, 5.0, residual),
    "cool": lambda table, residual: Cool(1.6, 0.0, residual),
}
WRITTEN_AGAIN = {
    "lantern": lambda near: additive(near, 0.4),
    "lantern++": lambda near: multiplicative(near, 5.0),
}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().sum() / 2)


def toys(count: int):
    """Random p, q [1, V] and neighbours [V, 3], V from 4 to 6."""
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        vocab = 4 + i % 3
        p, q = torch.rand(2, vocab, dtype=torch.float64, generator=generator).pow(1 + i % 4) + 1e-6
        table = neighbours(torch.rand(vocab, 2, generator=generator), 3)
        yield (p / p.sum())[None], (q / q.sum())[None], table


def enumerate_node(rule: Acceptance, p, q, tries: int):
    """The distribution [V] of the code decided, the mean of what was spent, and the mass let out by acceptance [V]."""
    if not tries or not q.sum():
        return p[0], 0.0, torch.zeros_like(p[0])
    distribution, spent, let_out = torch.zeros_like(p[0]), float(tv_cost(rule, p, q)), torch.zeros_like(p[0])
    for x in q[0].nonzero()[:, 0].tolist():
        code, chance = torch.tensor([x]), float(q[0, x])
        bent = rule.relax(p, code)
        kept = chance * min(1.0, float(bent[0, x]) / chance)
        distribution[x] += kept
        let_out[x] += kept
        if kept < chance:
            left = rule.residual(p, bent, q, code)
            below = enumerate_node(rule, left, without(q, code), tries - 1)
            distribution += (chance - kept) * below[0]
            spent += (chance - kept) * below[1]
            let_out += (chance - kept) * below[2]
    return distribution, spent, let_out


@cache
def nodes(rule: str, residual: str, children: int):
    """(p, distribution, spent, let out) of every toy node."""
    found = []
    for p, q, table in toys(CASES):
        found.append((p[0], *enumerate_node(MAKE[rule](table, residual), p, q, children)))
    return found


every_rule = pytest.mark.parametrize("rule", MAKE)
both = pytest.mark.parametrize("residual", ["paper", "optimal"])
several = pytest.mark.parametrize("children", [1, 2, 3])


@several
@both
@pytest.mark.parametrize("rule", WRITTEN_AGAIN)
def test_the_distribution_is_that_of_the_paper(rule, residual, children):
    for (p, q, table), (_, distribution, _, _) in zip(
        toys(CASES), nodes(rule, residual, children), strict=True
    ):
        relax = WRITTEN_AGAIN[rule](table.tolist())
        again = round_distribution(p[0].tolist(), q[0].tolist(), children, relax, residual == "optimal")
        assert distribution.tolist() == pytest.approx(again, abs=1e-12)


@several
@both
@every_rule
def test_what_is_spent_bounds_the_distance_and_is_it_for_one_child(rule, residual, children):
    for p, distribution, spent, _ in nodes(rule, residual, children):
        assert distribution.sum().item() == pytest.approx(1)
        assert distance(distribution, p) <= spent + 1e-12
        assert children > 1 or distance(distribution, p) == pytest.approx(spent, abs=1e-12)


@both
def test_lantern_pp_lets_no_code_out_beyond_lambda_times_its_share(residual):
    """So of one child's distribution at least 1 / lambda is p's own."""
    for p, distribution, _, let_out in nodes("lantern++", residual, 1):
        assert (let_out <= 5.0 * p + 1e-12).all() and distance(distribution, p) <= 1 - 1 / 5.0 + 1e-12


@every_rule
@pytest.mark.parametrize("children", [2, 3])
def test_the_papers_residual_is_near_the_least_that_its_acceptance_leaves(rule, children):
    """So what a better residual could still gain is little; the optimal one keeps more codes, and costs more."""
    paper, best = nodes(rule, "paper", children), nodes(rule, "optimal", children)
    over = [
        distance(distribution, p) - float((out - p).clamp(min=0).sum()) for p, distribution, _, out in paper
    ]
    assert min(over) > -1e-12 and sum(over) / CASES < 1e-3
    assert sum(distance(distribution, p) for p, distribution, _, _ in paper) <= sum(
        distance(distribution, p) for p, distribution, _, _ in best
    )
    assert sum(float(out.sum()) for *_, out in paper) <= sum(float(out.sum()) for *_, out in best)
