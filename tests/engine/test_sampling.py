from __future__ import annotations

import math

import pytest
import torch
from helpers.refusals import rejects
from transformers import TopKLogitsWarper

from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.nn.backend import backend

P = torch.tensor([0.1, 0.4, 0.2, 0.3])


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        (Sampling(top_k=2), [0, 0.4, 0, 0.3]),
        *((Sampling(top_k=k), [0.1, 0.4, 0.2, 0.3]) for k in (0, 4, 100)),
        *((Sampling(top_p=mass), [0, 0.4, 0, 0]) for mass in (1e-6, 0.3, 0.39)),
        *((Sampling(top_p=mass), [0, 0.4, 0, 0.3]) for mass in (0.45, 0.69)),
        (Sampling(top_p=0.75), [0, 0.4, 0.2, 0.3]),
        (Sampling(top_p=0.95), [0.1, 0.4, 0.2, 0.3]),
        # top-p counts what top-k left: 4 / 9, 3 / 9 and 2 / 9
        (Sampling(top_k=3, top_p=0.7), [0, 0.4, 0, 0.3]),
        (Sampling(top_k=3, top_p=0.8), [0, 0.4, 0.2, 0.3]),
        (Sampling(0.5), [0.01, 0.16, 0.04, 0.09]),
        (Sampling(2.0), [0.1**0.5, 0.4**0.5, 0.2**0.5, 0.3**0.5]),
    ],
    ids=str,
)
def test_probabilities_are_renormalised_over_the_codes_that_are_left(sampling, left):
    expected = torch.tensor(left) / sum(left)
    assert torch.allclose(sampling.probs(P.log()), expected)


@pytest.mark.parametrize("native", [None, backend()], ids=["PyTorch", "C"])
def test_of_equal_codes_top_k_keeps_all_and_top_p_as_many_as_it_needs(native):
    for given, kept in (({"top_k": 3}, 8), ({"top_p": 1e-6}, 1), ({"top_p": 0.5}, 4)):
        probs = Sampling(**given, backend=native).probs(torch.zeros(2, 5, 8))
        assert ((probs > 0).sum(-1) == kept).all() and probs.max().item() == pytest.approx(1 / kept)


@pytest.mark.parametrize("native", [None, backend()], ids=["PyTorch", "C"])
def test_top_k_of_rounded_logits_is_that_of_transformers(native):
    logits = torch.randn(50, 5000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    expected = TopKLogitsWarper(50)(None, logits).softmax(-1)
    assert ((expected > 0).sum(-1) > 50).any()
    assert torch.allclose(Sampling(top_k=50, backend=native).probs(logits), expected)


def test_greedy_keeps_the_plain_softmax_and_takes_its_argmax():
    sampling = Sampling(0, top_k=1, top_p=0.1)
    assert sampling.greedy and torch.allclose(sampling.probs(P.log()), P)
    assert sampling.draw(P[None], None).tolist() == [1]


def test_forbidden_codes_stay_forbidden():
    logits = torch.tensor([[1.0, float("-inf"), 2.0, float("-inf")]])
    for sampling in (Sampling(), Sampling(0), Sampling(0.5, top_k=3), Sampling(2.0, top_p=0.9)):
        probs = sampling.probs(logits)
        assert probs[0, [1, 3]].tolist() == [0, 0] and probs.sum().item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("kind", "name", "wrong"),
    [
        (Sampling, "temperature", (-0.1, math.nan)),
        (Sampling, "top_k", (-1,)),
        (Sampling, "top_p", (0.0, 1.5, math.nan)),
        (Guidance, "scale", (0.5, -1.0, math.nan)),
    ],
)
def test_numbers_out_of_range_are_rejected(kind, name, wrong):
    for value in wrong:
        rejects(str(value), kind, **{name: value})


def test_guidance_1_is_the_conditional_model_alone():
    logits = torch.randn(3, 5)
    guidance = Guidance(1.0)
    assert guidance.branches == 1 and torch.equal(guidance.rows(logits), logits)
    assert torch.equal(guidance.merge(logits), logits)


def test_guidance_moves_away_from_the_unconditional_logits_in_the_later_rows():
    conditional, unconditional = torch.randn(2, 4, 5)
    merged = Guidance(3.0).merge(torch.cat((conditional, unconditional)))
    assert torch.allclose(merged, unconditional + 3 * (conditional - unconditional), atol=1e-6)
    assert torch.equal(Guidance(2.0).rows(conditional), torch.cat((conditional, conditional)))


def test_logits_are_merged_in_single_precision_or_better():
    assert Guidance(2.0).merge(torch.zeros(2, 3, dtype=torch.bfloat16)).dtype == torch.float32
    assert Guidance(1.0).merge(torch.zeros(2, 3, dtype=torch.bfloat16)).dtype == torch.float32
    assert Guidance(2.0).merge(torch.zeros(2, 3, dtype=torch.float64)).dtype == torch.float64
