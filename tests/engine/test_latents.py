"""Latents follow the target's distribution exactly, however bad the drafter: one dimension by its density, two by energy distance."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.latents import agreement, diffusion_parts, energies, mixture_parts, next_latents, wrong_residual
from torch import Tensor

from lanternpp.accept.exact import Exact
from lanternpp.engine import latent_decode
from lanternpp.engine.decode import engine_class
from lanternpp.engine.latent_decode import LatentEngine, draw_residual, verify_latents
from lanternpp.engine.latents import GaussianMixture, MixtureGuidance, MixtureSampling
from lanternpp.engine.noise import Noise
from lanternpp.trees.static import chain_tree
from lanternpp.types import Draft

Parts = Callable[[bool, int], tuple[Any, ...]]
DRAWS = 200_000
EDGES = torch.linspace(-4, 4, 81, dtype=torch.float64)
P = torch.tensor([0.3, -0.2, 0.5, -1.5, 0.2, 2.0, -0.7, 0.1, -1.2], dtype=torch.float64)  # three components
Q = torch.tensor([0.0, 0.8, -1.0, -1.0, 0.9, 1.0, 0.2, -0.5, 0.3], dtype=torch.float64)


def decided(p: Tensor, q: Tensor, depth: int = 1) -> tuple[Tensor, Tensor]:
    """DRAWS latents decided after the root by verifying a chain, and how many levels were accepted."""
    sampling, noise = MixtureSampling(), Noise(torch.arange(DRAWS), torch.ones(DRAWS, dtype=torch.int64))
    distribution = q.expand(DRAWS, 1, -1)
    drafted = [sampling.children(distribution, 1, noise, Noise.DRAFT + level)[:, 0] for level in range(depth)]
    codes = torch.cat((torch.zeros(DRAWS, 1, 1), *drafted), 1)
    draft = Draft(chain_tree(DRAWS, depth, codes.device), codes, distribution.expand(-1, depth + 1, -1))
    verdict = verify_latents(draft, p.expand(DRAWS, depth + 1, -1), sampling, Exact(), noise)
    return verdict.next_codes[:, 0, 0], verdict.kept


def test_one_latent_follows_the_density() -> None:
    drawn, kept = decided(P, Q)
    assert agreement(drawn, P, EDGES) > 1e-3
    assert agreement(drawn, Q, EDGES) < 1e-12  # so the test would detect a wrong distribution
    line = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    least = torch.minimum(
        *(GaussianMixture.of(distribution, 1).log_prob(line[:, None]).exp() for distribution in (P, Q))
    )
    accepted = (kept == 2).double().mean().item()
    assert accepted == pytest.approx(torch.trapezoid(least, line).item(), abs=4 * 0.5 / math.sqrt(DRAWS))


def test_a_wrong_residual_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_decode, "draw_residual", wrong_residual)
    assert agreement(decided(P, Q)[0], P, EDGES) < 1e-12


def test_a_draw_from_the_residual_does_not_depend_on_the_batch() -> None:
    noise = Noise(torch.arange(400), torch.full((400,), 3))
    near = P + 0.01  # nearly all draws from p are rejected then
    p, q, rejected = P.expand(400, -1), near.expand(400, -1), torch.arange(400) % 2 == 0
    together = draw_residual(p, q, rejected, noise, 1)
    for part in (slice(0, 7), slice(8, 9), slice(9, 400)):
        mine = Noise(noise.seed[part], noise.step[part])
        assert torch.equal(draw_residual(p[part], q[part], rejected[part], mine, 1), together[part])


def test_drawing_a_residual_of_nan_ends() -> None:
    nan = torch.full((2, 9), math.nan, dtype=torch.float64)
    noise = Noise(torch.arange(2), torch.ones(2, dtype=torch.int64))
    assert draw_residual(nan, nan, torch.ones(2, dtype=torch.bool), noise, 1).shape == (2, 1)


def test_drawing_a_residual_of_densities_narrower_than_float32_ends() -> None:
    p, q = torch.tensor([[[0, 3, math.log(1e-8)]], [[0, 3 + 1e-9, math.log(9e-9)]]], dtype=torch.float64)
    noise = Noise(torch.arange(1), torch.ones(1, dtype=torch.int64))
    assert draw_residual(p, q, torch.ones(1, dtype=torch.bool), noise, 1).item() == 3


def test_densities_are_those_of_pytorch() -> None:
    torch.manual_seed(0)
    params, x = torch.randn(4, 3 * 7, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    mine = GaussianMixture.of(params, 3)
    parts = torch.distributions.Independent(torch.distributions.Normal(mine.mean, mine.log_std.exp()), 1)
    weights = torch.distributions.Categorical(logits=params[:, :3])
    assert torch.allclose(mine.log_prob(x), torch.distributions.MixtureSameFamily(weights, parts).log_prob(x))


def test_guided_parameters_of_one_component_are_the_usual_distribution() -> None:
    scale, std = 2.5, -0.4
    rows = torch.tensor([[[0.7, 1.0, std]], [[0.1, -0.5, std]]], dtype=torch.float64)
    x = torch.linspace(-3, 4, 8, dtype=torch.float64)[:, None]
    guided, own, null = (
        GaussianMixture.of(distribution, 1).log_prob(x)
        for distribution in (MixtureGuidance(scale, channels=1).merge(rows)[0, 0], rows[0, 0], rows[1, 0])
    )
    usual = scale * own + (1 - scale) * null
    assert torch.allclose((guided - usual).diff(), torch.zeros(7, dtype=torch.float64), atol=1e-12)


def engine_of(parts: tuple[Any, ...]) -> LatentEngine:
    """An engine of the class that decodes latents."""
    made = engine_class(parts[0])(*parts)
    assert isinstance(made, LatentEngine)
    return made


@pytest.mark.parametrize("parts", [mixture_parts, diffusion_parts])
def test_drafted_latents_follow_the_distribution_of_plain_decoding(
    monkeypatch: pytest.MonkeyPatch, parts: Parts
) -> None:
    def drawn(drafted: bool, first: int) -> Tensor:
        return next_latents(engine_of(parts(drafted, 1500)), first)

    plain = drawn(False, 0)
    found, chance = energies(plain, drawn(True, 10_000))
    assert found < chance[-2]
    monkeypatch.setattr(latent_decode, "draw_residual", wrong_residual)
    found, chance = energies(plain, drawn(True, 10_000))
    assert found > 2 * chance[-1] > 0


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("parts", [mixture_parts, diffusion_parts])
def test_a_picture_does_not_depend_on_its_batch(parts: Parts, drafted: bool) -> None:
    """Alone, and in a batch between two others."""
    wide, alone = engine_of(parts(drafted, 3)), engine_of(parts(drafted, 1))
    for slot, seed in ((0, 4), (1, 5), (2, 6)):
        wide.admit(slot, "tulip", seed)
    alone.admit(0, "tulip", 5)
    for engine in (wide, alone):
        while min(engine.decided()) < engine.target.length:
            engine.step()
    one, other = wide.collect(1), alone.collect(0)
    assert sum(one.accepted) == wide.target.length
    assert torch.allclose(one.codes, other.codes, atol=1e-5)
