"""What relaxing costs: the distribution of relaxed rules and its total variation from the target, against plain enumeration."""

from __future__ import annotations

import pytest
import torch
from helpers.distributions import additive, chi_square, multiplicative, round_distribution
from helpers.toys import Outputs, ToyTarget, eagle, neighbours

from lanternpp.accept.base import Acceptance, tv_cost
from lanternpp.accept.mixture import DraftMixture
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.accept.scaled import Cool
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.engine.verify import VERIFIERS
from lanternpp.engine.verify.tokenwise import verify_tokenwise, without
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.dynamic import DynamicTree
from lanternpp.trees.static import EAGLE, StaticTree, chain, chain_tree
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


POINTS = torch.eye(VOCAB, dtype=torch.float64)  # drafters with all probability on one code
P = torch.cat((distributions(60, 3.0), distributions(60, 2.0, 0.2), distributions(VOCAB, 2.0)))
Q = torch.cat((distributions(60, 4.0, 0.1), distributions(60, 1.0), POINTS))
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
REFERENCE = {
    "lantern 0.6": additive(TABLE.tolist(), 0.6),
    "lantern++ 9": multiplicative(TABLE.tolist(), 9.0),
}
every_residual = pytest.mark.parametrize("residual", ["paper", "optimal"])


def enumerated(rule: Acceptance, p: torch.Tensor, q: torch.Tensor, tries: int) -> tuple[torch.Tensor, float]:
    """The distribution of a node's code, its children tried one after another, from `relax` and `residual`: one row p, q [V].

    Also the mean of the costs that are summed.
    """
    if not tries or not q.sum():
        return p, 0.0
    distribution, cost = torch.zeros_like(p), float(tv_cost(rule, p, q))
    for x in q.nonzero()[:, 0].tolist():
        code, chance = torch.tensor([x]), float(q[x])
        relaxed = rule.relax(p[None], code)
        kept = min(chance, float(relaxed[0, x]))
        distribution[x] += kept
        if kept < chance:
            left = rule.residual(p[None], relaxed, q[None], code)[0]
            below, more = enumerated(rule, left, without(q[None], code)[0], tries - 1)
            distribution, cost = distribution + (chance - kept) * below, cost + (chance - kept) * more
    return distribution, cost


def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).abs().sum(-1) / 2


@pytest.mark.parametrize("rule", MAKE)
@every_residual
def test_the_cost_of_a_child_is_the_distance_of_its_enumerated_distribution(rule, residual):
    made = MAKE[rule](residual)
    found = torch.stack([enumerated(made, p, q, 1)[0] for p, q in zip(P, Q, strict=True)])
    assert torch.allclose(found.sum(-1), torch.ones(len(P)).double())
    assert torch.allclose(made.output_distribution(P, Q), found, atol=1e-12)
    assert torch.allclose(Acceptance.output_distribution(made, P, Q), found, atol=1e-12)
    cost = tv_cost(made, P, Q)
    assert torch.allclose(cost, distance(found, P), atol=1e-12)
    assert torch.allclose(tv_cost(made, P.float(), Q.float()).double(), cost, atol=1e-5)
    own = torch.where(Q > 0, made.accept_mass(P, Q), 0)
    assert torch.allclose(own, torch.where(Q > 0, Acceptance.accept_mass(made, P, Q), 0), atol=1e-12)
    accepted = torch.minimum(Q, own)
    if rule.startswith("lantern++"):
        assert (accepted <= float(rule.split()[1]) * P + 1e-12).all(), "at most lambda times its own"
    # whatever is drawn after a rejection, the distance is no less than the mass accepted beyond p
    least, optimal = (accepted - P).clamp(min=0).sum(-1), residual == "optimal"
    assert (torch.allclose(cost, least, atol=1e-12)) if optimal else (cost >= least - 1e-12).all()


@pytest.mark.parametrize("children", [1, 2, 3])
@every_residual
@pytest.mark.parametrize("rule", REFERENCE)
def test_the_distribution_of_several_children_is_that_of_the_paper(rule, residual, children):
    for p, q in zip(P[::4], Q[::4], strict=True):
        expected = round_distribution(
            p.tolist(), q.tolist(), children, REFERENCE[rule], residual == "optimal"
        )
        found, cost = enumerated(MAKE[rule](residual), p, q, children)
        assert found.tolist() == pytest.approx(expected, abs=1e-12)
        assert distance(found, p) <= cost + 1e-12, "the sum of the costs bounds the distance"


@pytest.mark.parametrize("rule", [rule for rule in MAKE if "level" not in rule])
@every_residual
def test_tokenwise_verification_reports_the_enumerated_cost(rule, residual):
    made, p, q, draws = MAKE[rule](residual), P[3], Q[3], 20_000
    noise = Noise(torch.arange(draws), torch.ones(draws, dtype=torch.int64))
    probs = q.expand(draws, 2, -1)
    child = Sampling().children(probs[:, :1], 1, noise, Noise.DRAFT)[:, 0]
    draft = Draft(
        chain_tree(draws, 1, torch.device("cpu")), torch.cat((torch.zeros_like(child), child), 1), probs
    )
    verdict = verify_tokenwise(draft, p.log().expand(draws, 2, -1), Sampling(), made, noise, measure_tv=True)
    (found, _), cost = enumerated(made, p, q, 1), verdict.tv_cost
    assert chi_square(verdict.next_codes[:, 0].bincount(minlength=VOCAB), found) > 1e-3
    assert cost[:, 0].min() == cost[:, 0].max() and not cost[:, 1].any()
    assert cost[0, 0].item() == pytest.approx(distance(found, p).item())


@pytest.mark.parametrize(
    "rule",
    [
        Lantern(TABLE, 0.6, "optimal"),
        Lantern(TABLE, 0.6),
        DraftMixture(0.5),
        Cool(2.0),
        Cool(2.0, 0, "paper"),
    ],
)
@pytest.mark.parametrize("verify", VERIFIERS)
def test_a_code_that_the_format_forbids_costs_nothing(rule, verify):
    count = 40_000
    p, q = distributions(2, 2.0).unbind()
    q[3] += 2  # drafted often
    p[3] = 0
    p, q = p / p.sum(), (q / q.sum()).expand(count, 2, -1)
    noise = Noise(torch.arange(count), torch.ones(count, dtype=torch.int64))
    codes = torch.cat((torch.zeros(count, 1).long(), Sampling().children(q[:, :1], 1, noise, 16)[:, 0]), 1)
    draft = Draft(chain_tree(count, 1, q.device), codes, q.clone())
    logits = p.log().expand(count, 2, -1)
    verdict = VERIFIERS[verify](draft, logits, Sampling(), rule, noise, True)
    drawn = torch.bincount(verdict.next_codes[:, 0], minlength=VOCAB) / count
    assert drawn[3] == 0
    assert float((drawn - p).abs().sum() / 2) == pytest.approx(float(verdict.tv_cost[:, 0].mean()), abs=0.01)


def test_a_greedy_choice_costs_one_where_it_is_not_the_most_probable():
    draft = Draft(chain_tree(2, 2, torch.device("cpu")), torch.tensor([[0, 1, 2], [0, 0, 3]]), None)
    p = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0]).double()
    table = torch.tensor([[1], [0], [0], [0], [0], [0], [0]])
    noise = Noise(torch.arange(2), torch.ones(2, dtype=torch.int64))
    rule = Lantern(table, 0.5)
    verdict = verify_tokenwise(draft, p.log().expand(2, 3, -1), Sampling(0), rule, noise, measure_tv=True)
    assert verdict.kept.tolist() == [3, 3]
    assert verdict.tv_cost.tolist() == [[1, 1, 0], [0, 1, 0]]


# Through the engine.


def draw(target, rule, builder, sampling, batch, measure_tv=True):
    proposer = TreeProposer(eagle(target), builder)
    engine = Engine(target, proposer, rule, sampling, Guidance(3.0), batch, measure_tv)
    return generate(engine, ["a", "sea", None, "hill"], [3, 1, 4, 5])


@pytest.mark.parametrize(
    "tree", [lambda: StaticTree(EAGLE), lambda: DynamicTree(5, 4, 20)], ids=["static", "eagle2"]
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0)], ids=["T=1", "greedy"])
def test_pictures_report_their_cost_and_measuring_it_changes_no_code(tree, sampling):
    target = ToyTarget(grid=3)
    table = neighbours(target.codebook, 5)
    for rule in (Lantern(table, 0.4, "optimal"), LanternPlusPlus(table, 4.0), Cool(1.7, 0.1, "paper")):
        four = draw(target, rule, tree(), sampling, 4)
        alone = draw(target, rule, tree(), sampling, 1)
        unmeasured = draw(target, rule, tree(), sampling, 4, measure_tv=False)
        assert [sample.codes.tolist() for sample in four] == [sample.codes.tolist() for sample in unmeasured]
        assert (
            [sample.accepted for sample in four]
            == [sample.accepted for sample in alone]
            == [sample.accepted for sample in unmeasured]
        )
        assert [sample.tv_cost for sample in four] == pytest.approx(
            [sample.tv_cost for sample in alone], abs=1e-5
        )
        assert [sample.tv_cost for sample in unmeasured] == [None] * 4
        assert all(sample.tv_cost >= 0 for sample in four)
        if not isinstance(rule, Cool) or not sampling.greedy:
            assert sum(sample.tv_cost for sample in four) > 0


@pytest.mark.parametrize("verify", ["token", "block"])
def test_the_cost_of_a_picture_is_the_sum_over_its_accepted_nodes(verify):
    target, outputs = ToyTarget(grid=3), Outputs()
    rule = Lantern(neighbours(target.codebook, 5), 0.4, "optimal")
    proposer = TreeProposer(eagle(target), StaticTree(chain(3)))
    engine = Engine(target, proposer, rule, Sampling(), Guidance(), 1, True, VERIFIERS[verify])
    engine.observers.append(outputs)
    (sample,) = generate(engine, ["a"], [3])
    verdicts = [output.verdict for output in outputs.seen]
    kept = [float(verdict.tv_cost[0, : int(verdict.kept)].sum()) for verdict in verdicts]
    assert sample.tv_cost == pytest.approx(sum(kept))
