"""Weights in 8 bits: what is stored, and what is reported."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from helpers.refusals import rejects
from torch import nn

from lanternpp.api import model as models
from lanternpp.drafters.parallel import ParallelDrafter
from lanternpp.nn import int8


def test_the_error_of_a_weight_is_at_most_half_a_step() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Embedding(4, 8))
    weight = net[0].weight.detach().clone()
    assert int8.weight_bytes(net) == 4 * 48 * 64
    int8.quantise(net)
    error = (net[0](torch.eye(64)).T - weight).abs()
    assert 0 < error.max() and (error <= 0.51 * weight.abs().amax(1, keepdim=True) / 127).all()
    assert 48 * 64 < int8.weight_bytes(net) <= 48 * 64 + 8 * 48
    assert type(net[1].weight) is nn.Parameter


def test_the_effect_is_measured_on_logits() -> None:
    before = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    after = torch.tensor([[0.0, 0.0], [1.0, 1.0 + torch.log(torch.tensor(3.0)).item()]])
    effect = int8.compared(before, after, (10, 5))
    assert effect.max_logit_difference == pytest.approx(1.0986, abs=1e-4)
    assert effect.mean_logit_difference == pytest.approx(1.0986 / 4, abs=1e-4)
    # 1/2, 1/2 becomes 1/4, 3/4 in one of two
    assert effect.total_variation == pytest.approx(0.25 / 2, abs=1e-6)


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        int8, "find_spec", lambda name: None if name == "torchao" else importlib.util.find_spec(name)
    )
    rejects(r"needs torchao.*pip install 'lanternpp\[int8\]'", int8.require, "int8")


@pytest.mark.parametrize("floats", [False, True])
def test_stored_8_bits_are_kept_if_the_kernels_multiply_in_float32(
    floats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = torch.float32 if floats else torch.bfloat16
    monkeypatch.setattr("lanternpp.kernels.Kernels.gemm_dtype", lambda self, like: computed)
    monkeypatch.setattr("lanternpp.kernels.Kernels.packs", lambda self, like: False)
    monkeypatch.setattr(models, "pack_target", lambda target: None)
    monkeypatch.setattr(ParallelDrafter, "pack", lambda self, target: None)
    half = torch.bfloat16
    model = models.Model(models.model_folder("nature-128"), None, torch.device("cpu"), half)
    drafter, head = model.network("parallel"), model.target.codes_out.weight
    weights = [head, drafter.fc.weight, drafter.decoder.blocks[0].w2.weight]  # the drafter's in 6 bits
    weights += [weight for weight in model.target.decoder.parameters() if weight.ndim == 2]
    kept = [int8.int8_parts(weight) for weight in weights]
    assert all(parts is not None for parts in kept) if floats else not any(kept)
    for weight, parts in zip(weights, kept, strict=True):
        if parts is not None:
            assert torch.equal((parts[0].float() * parts[1][:, None]).to(half), weight)
            assert sum(part.nbytes for part in parts) == weight.numel() + 4 * len(weight)
