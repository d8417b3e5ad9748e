"""Latents of a diffusion head: their distribution, drafts from the same noise, the published rule, which is not exact, and refusals."""

from __future__ import annotations

import pytest
import torch
from helpers.latents import agreement, eagle, small_diffusion, tiny_target
from helpers.refusals import rejects
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Cspd, Exact
from lanternpp.drafters.eagle import DiffusionDrafter
from lanternpp.engine.decode import engine_class
from lanternpp.engine.latent_decode import verify_latents
from lanternpp.engine.latents import DiffusionSampling
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.errors import InputError
from lanternpp.models.latents import ContinuousTarget, Denoiser
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees import build_tree
from lanternpp.trees.static import chain_tree
from lanternpp.types import Draft, Verdict
from losses import denoising_loss, variational_bound

DRAWS, STEPS = 60_000, 4
EDGES = torch.linspace(-2.5, 3.5, 61, dtype=torch.float64)
# mean, standard deviation
P, Q = (torch.tensor(distribution, dtype=torch.float64) for distribution in ((0.4, 0.7), (0.3, 0.9)))


class GaussianHead(Denoiser):
    """The exact head of a Gaussian, whose mean and standard deviation are its features."""

    def __init__(self) -> None:
        super().__init__(2, 1, 1, 1)

    def conditions(self, features: Tensor) -> Tensor:
        return features

    def forward(self, x: Tensor, t: Tensor, conditions: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = conditions[..., :1], conditions[..., 1:]
        angle = t[..., None] * torch.pi / 2
        a, b = angle.cos(), angle.sin()
        spread = (a * std).square() + b.square()  # the variance of x
        v = a * b * (1 - std.square()) / spread * (x - a * mean) - b * mean
        return v, (std.log() - spread.log() / 2).expand_as(v)


def sampling(steps: int = STEPS, temperature: float = 1.0) -> DiffusionSampling:
    return DiffusionSampling(temperature, 0, 1.0, 1, steps, denoiser=GaussianHead().double())


def noise(draws: int = DRAWS) -> Noise:
    return Noise(torch.arange(draws), torch.ones(draws, dtype=torch.int64))


def p_value(drawn: Tensor, distribution: Tensor = P) -> float:
    """How well latents [n] agree with a Gaussian."""
    return agreement(drawn, torch.stack((torch.zeros(()), distribution[0], distribution[1].log())), EDGES)


def verified(
    p: Tensor, q: Tensor, rule: Acceptance | None = None, aligned: bool = True, depth: int = 1
) -> Verdict:
    """DRAWS chains of latents drawn under q and verified against p."""
    head = sampling()
    every = torch.stack([head.noise(noise(), Noise.DRAFT + level) for level in range(depth)], 1)
    last = head.last_step(q.expand(DRAWS, depth, -1), every)
    codes = torch.cat((torch.zeros(DRAWS, 1, 1), head.end(last, every)), 1)
    draft = Draft(chain_tree(DRAWS, depth, codes.device), codes, torch.cat((last, last[:, :1]), 1))
    distributions = p.expand(DRAWS, depth + 1, -1)
    step = torch.full((DRAWS,), 1 if aligned else 2)
    return verify_latents(draft, distributions, head, rule or Exact(), Noise(noise().seed, step))


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_any_number_of_steps_draws_from_a_gaussian_exactly(steps: int) -> None:
    drawn = sampling(steps).children(P.expand(DRAWS, 1, -1), 1, noise(), Noise.DRAFT)[:, 0, 0, 0]
    assert p_value(drawn) > 1e-3
    assert p_value(drawn, Q) < 1e-12  # so the test would detect a wrong distribution


def test_temperature_narrows_every_step() -> None:
    distribution, warm = P.expand(20_000, 1, -1), noise(20_000)
    one, cool = (sampling(1, t).children(distribution, 1, warm, Noise.DRAFT).std().item() for t in (1.0, 0.5))
    assert one == pytest.approx(0.7, abs=0.02) and cool == pytest.approx(one / 2, rel=1e-5)


def test_guidance_goes_from_the_unconditional_prediction_through_the_conditional_one() -> None:
    # the same width, so that v is linear in the mean
    both = torch.tensor([0.5, 0.6, 0.2, 0.6], dtype=torch.float64)
    guided = DiffusionSampling(1.0, 0, 1.0, 1, STEPS, 2.0, denoiser=GaussianHead().double())
    drawn = guided.children(both.expand(100, 1, -1), 1, noise(100), Noise.DRAFT)
    plain = sampling().children(
        torch.tensor([0.8, 0.6]).double().expand(100, 1, -1), 1, noise(100), Noise.DRAFT
    )
    assert torch.allclose(drawn, plain, atol=1e-6)


def test_drafts_keep_the_targets_distribution_and_aligned_noise_accepts_more() -> None:
    aligned, unaligned = verified(P, Q), verified(P, Q, aligned=False)
    for verdict in (aligned, unaligned):
        assert p_value(verdict.next_codes[:, 0, 0]) > 1e-3
    kept, without = ((verdict.kept == 2).double().mean().item() for verdict in (aligned, unaligned))
    assert kept > without + 0.1


def test_the_latent_after_an_accepted_draft_follows_the_target() -> None:
    verdict = verified(P, P, depth=2)
    assert verdict.kept.min() == 3  # the drafter is the target
    assert p_value(verdict.bonus[:, 0]) > 1e-3


def test_the_published_rule_keeps_more_and_has_another_distribution() -> None:
    exact, published = verified(P, Q), verified(P, Q, Cspd())
    assert (published.kept == 2).double().mean() > (exact.kept == 2).double().mean() + 0.05
    assert p_value(published.next_codes[:, 0, 0]) < 1e-12
    assert verified(P, P, Cspd()).kept.min() == 2


def test_a_head_learns_a_distribution_of_two_modes() -> None:
    torch.manual_seed(0)
    head, weight, mean, std = Denoiser(2, 1, 48, 2), 0.6, torch.tensor([-1.0, 1.2]), torch.tensor([0.4, 0.3])
    optimizer = torch.optim.AdamW(head.parameters(), 3e-3, weight_decay=0)
    features = torch.zeros(256, 2)

    def real(count: int) -> Tensor:
        mode = (torch.rand(count) > weight).long()
        return (mean[mode] + std[mode] * torch.randn(count))[:, None]

    for step in range(250):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / 250)
        optimizer.zero_grad()
        denoising_loss(head, features, real(256), 4).mean().backward()
        optimizer.step()
    head.requires_grad_(False)
    distribution = DiffusionSampling(1.0, 0, 1.0, 1, 12, denoiser=head)
    drawn = (
        distribution.children(torch.zeros(20_000, 1, 2), 1, noise(20_000), Noise.DRAFT)
        .flatten()
        .sort()
        .values
    )
    shares = torch.tensor([weight, 1 - weight])
    true = (torch.special.ndtr((drawn[:, None] - mean) / std) * shares).sum(1)
    assert (true - (torch.arange(20_000) + 0.5) / 20_000).abs().max() < 0.05
    held = real(4000)
    nats = (
        -(shares * torch.exp(-((held - mean) / std).square() / 2) / std / (2 * torch.pi) ** 0.5).sum(1).log()
    )
    bound = variational_bound(head, torch.zeros(4000, 2), held, 12, torch.Generator().manual_seed(0))
    assert nats.mean() - 0.02 < bound.mean() < nats.mean() + 0.15  # one Gaussian: 0.5 above


def test_unsupported_drafters_rules_and_temperatures_are_rejected() -> None:
    target, mixture = small_diffusion()[0], tiny_target(ContinuousTarget, "latent_out", components=3)
    tree, rest = build_tree("chain-2"), (Sampling(), Guidance(), 1)
    with pytest.raises(InputError, match="has no diffusion head"):
        engine_class(target)(target, TreeProposer(eagle(target), tree), Exact(), *rest)
    with pytest.raises(InputError, match="of 3 channels and the target of 2"):
        wrong = eagle(target, DiffusionDrafter, channels=3)
        engine_class(target)(target, TreeProposer(wrong, tree), Exact(), *rest)
    with pytest.raises(InputError, match=r"--accept exact$"):
        engine_class(mixture)(mixture, TreeProposer(eagle(mixture), tree), Cspd(), *rest)
    rejects("temperature 0", engine_class(target), target, NoDraft(), Exact(), Sampling(0), Guidance(), 1)
