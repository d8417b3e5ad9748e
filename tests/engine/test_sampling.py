from __future__ import annotations

import pytest
import torch
from helpers.refusals import rejects

from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling


def test_top_k_keeps_exactly_k_on_ties():
    probs = Sampling(top_k=3).probs(torch.zeros(2, 5, 8))
    assert ((probs > 0).sum(-1) == 3).all()
    assert probs.max().item() == pytest.approx(1 / 3)


def test_top_k_keeps_the_most_probable_in_proportion():
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    assert Sampling(top_k=2).probs(p.log()).tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7])


@pytest.mark.parametrize("k", [0, 4, 100])
def test_top_k_of_all_codes_changes_nothing(k):
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    assert torch.allclose(Sampling(top_k=k).probs(p.log()), p)


@pytest.mark.parametrize(
    ("top_p", "codes"), [(0.3, 1), (0.39, 1), (0.45, 2), (0.69, 2), (0.75, 3), (0.95, 4)]
)
def test_top_p_keeps_the_smallest_set_of_that_mass(top_p, codes):
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    kept = Sampling(top_p=top_p).probs(p.log())
    best = p.argsort(descending=True)[:codes]
    expected = torch.zeros(4).scatter(0, best, p[best] / p[best].sum())
    assert torch.allclose(kept, expected)


def test_top_p_always_keeps_a_code_and_ties_do_not_all_come_along():
    probs = Sampling(top_p=1e-6).probs(torch.zeros(3, 8))
    assert ((probs > 0).sum(-1) == 1).all()
    assert (Sampling(top_p=0.5).probs(torch.zeros(8)) > 0).sum() == 4


def test_top_p_counts_what_top_k_left():
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    assert (Sampling(top_k=3, top_p=0.7).probs(p.log()) > 0).tolist() == [True, True, False, False]
    assert (Sampling(top_k=3, top_p=0.8).probs(p.log()) > 0).tolist() == [True, True, True, False]


def test_temperature_is_a_power():
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    for temperature in (0.5, 2.0):
        expected = p ** (1 / temperature)
        assert torch.allclose(Sampling(temperature).probs(p.log()), expected / expected.sum())


def test_greedy_keeps_the_plain_softmax_and_takes_its_argmax():
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    sampling = Sampling(0, top_k=1, top_p=0.1)
    assert sampling.greedy and torch.allclose(sampling.probs(p.log()), p)
    assert sampling.draw(p, None).tolist() == [1]


def test_forbidden_codes_stay_forbidden():
    logits = torch.tensor([[1.0, float("-inf"), 2.0, float("-inf")]])
    for sampling in (Sampling(), Sampling(0), Sampling(0.5, top_k=3), Sampling(2.0, top_p=0.9)):
        probs = sampling.probs(logits)
        assert probs[0, [1, 3]].tolist() == [0, 0] and probs.sum().item() == pytest.approx(1)


def test_the_greedy_residual_is_what_it_was():
    p = torch.tensor([[0.4, 0.6]])
    assert Sampling(0).residual(None, p, p, p, torch.tensor([1])) is p


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -0.1}, "-0.1"),
        ({"temperature": float("nan")}, "nan"),
        ({"top_k": -1}, "-1"),
        ({"top_p": 0.0}, "0.0"),
        ({"top_p": 1.5}, "1.5"),
        ({"top_p": float("nan")}, "nan"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, named):
    rejects(named, Sampling, **options)


@pytest.mark.parametrize("scale", [0.5, -1.0, float("nan")])
def test_guidance_below_1_is_refused(scale):
    rejects(str(scale), Guidance, scale)


def test_guidance_1_is_the_conditional_model_alone():
    logits = torch.randn(3, 5)
    guidance = Guidance(1.0)
    assert guidance.branches == 1 and torch.equal(guidance.rows(logits), logits)
    assert torch.equal(guidance.merge(logits), logits)


def test_guidance_moves_away_from_the_unconditional_logits():
    guidance = Guidance(3.0)
    conditional, unconditional = torch.randn(2, 4, 5), torch.randn(2, 4, 5)
    merged = guidance.merge(torch.cat((conditional, unconditional)))
    assert torch.allclose(merged, unconditional + 3 * (conditional - unconditional), atol=1e-6)


def test_rows_put_all_conditional_rows_first():
    x = torch.arange(6).view(3, 2)
    assert torch.equal(Guidance(2.0).rows(x), torch.cat((x, x)))


def test_logits_are_merged_in_single_precision_or_better():
    assert Guidance(2.0).merge(torch.zeros(2, 3, dtype=torch.bfloat16)).dtype == torch.float32
    assert Guidance(1.0).merge(torch.zeros(2, 3, dtype=torch.bfloat16)).dtype == torch.float32
    assert Guidance(2.0).merge(torch.zeros(2, 3, dtype=torch.float64)).dtype == torch.float64
