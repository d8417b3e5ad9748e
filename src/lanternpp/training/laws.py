"""How a drafter's training compares the drafter's distributions with the target's: over codes, or over latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lanternpp.drafters.diffusion import DRAFTER, DiffusionDrafter
from lanternpp.drafters.eagle import EagleDrafter
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.latents import GaussianMixture, MixtureGuidance
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.models.latents.denoiser import noisy
from lanternpp.models.latents.target import DiffusionTarget
from lanternpp.training import losses

LOSSES: dict[str, Any] = {
    "paper": losses.soft_cross_entropy,
    "guided": losses.soft_cross_entropy,
    "lk": losses.lk_loss,
    "both": losses.cross_entropy_and_lk,
}
TIMES = (
    4  # at which diffusion heads are compared at every place, the last of which is that of their last step
)
SAMPLES = 4  # latents drawn from the target at every place, by which integrals are estimated


class CodeLaws:
    """Distributions over codes, given by logits [..., V]."""

    tree = "eagle-25"  # on which acceptance is measured
    kind = "eagle"  # of the drafter that is trained
    drafter: type[EagleDrafter] = EagleDrafter

    def __init__(self, name: str):
        self.name = name
        self.fields: dict[str, Any] = {}  # of the drafter's config, besides its decoder's

    def guidance(self, scale: float) -> Guidance:
        """Classifier-free guidance of this scale."""
        return Guidance(scale)

    def points(self, codes: Tensor) -> Tensor:
        """Where the laws of codes [B, n, ...] are compared, [B, n, ...]; here nowhere in particular."""
        return codes

    def head(
        self, target: Target, network: Target | EagleDrafter, features: Tensor, points: Tensor
    ) -> Tensor:
        """Features [R, n, D] that a target or its drafter predicts -> their laws, [R, n, P]; points [B, n, ...]."""
        return target.head(features)

    def loss(self, q: Tensor, p: Tensor) -> Tensor:
        """The loss on the drafter's q beside the target's p, of those in `LOSSES`."""
        loss: Tensor = LOSSES[self.name](q, p)
        return loss

    def soft_cross_entropy(self, q: Tensor, p: Tensor) -> Tensor:
        """Mean nats of q under p."""
        return losses.soft_cross_entropy(q, p)

    def acceptance(self, q: Tensor, p: Tensor) -> Tensor:
        """The chance that a draft from q is kept, [...]."""
        return losses.acceptance(q, p)

    def agreement(self, q: Tensor, p: Tensor) -> Tensor:
        """How often both have the same likeliest code."""
        return (p.argmax(-1) == q.argmax(-1)).double().mean()


class LatentLaws(CodeLaws):
    """Mixtures over latents, given by parameters [..., P]; integrals are estimated by a few latents drawn from p."""

    tree = "chain-4"

    def __init__(self, name: str, channels: int):
        super().__init__(name)
        if name not in ("paper", "guided"):
            raise InputError(f"loss {name!r} takes an integral over latents: choose paper or guided.")
        self.channels = channels

    def guidance(self, scale: float) -> Guidance:
        """Guidance of the mixtures' parameters."""
        return MixtureGuidance(scale, self.channels)

    def log_probs(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of q and p at latents drawn from p, [..., SAMPLES] each."""
        with torch.no_grad():
            law = GaussianMixture.of(p.float(), self.channels)
            u = torch.rand(*p.shape[:-1], SAMPLES, 1 + self.channels, device=p.device)
            latents = law.draw(u.clamp(1e-6, 1 - 1e-6))
        other, own = (
            GaussianMixture.of(x.float()[..., None, :], self.channels).log_prob(latents) for x in (q, p)
        )
        return other, own

    def loss(self, q: Tensor, p: Tensor) -> Tensor:
        """The cross-entropy."""
        return self.soft_cross_entropy(q, p)

    def soft_cross_entropy(self, q: Tensor, p: Tensor) -> Tensor:
        """Mean nats of a number of a latent under q, the latents drawn from p."""
        return -self.log_probs(q, p)[0].mean() / self.channels

    def acceptance(self, q: Tensor, p: Tensor) -> Tensor:
        """The mean of min(1, q / p) under p, which is the chance that a draft from q is kept."""
        log_q, log_p = self.log_probs(q, p)
        return (log_q - log_p).clamp(max=0).exp().mean(-1).clamp_min(1e-6)

    def agreement(self, q: Tensor, p: Tensor) -> Tensor:
        """How often both have the same heaviest component."""
        first, second = (GaussianMixture.of(x, self.channels).log_weight.argmax(-1) for x in (q, p))
        return (first == second).double().mean()


class DiffusionLaws(LatentLaws):
    """What diffusion heads predict of the same noisy latents: a Gaussian of v for each, kept like the components of a mixture."""

    kind = DRAFTER
    drafter = DiffusionDrafter

    def __init__(self, name: str, channels: int, steps: int):
        super().__init__(name, channels)
        self.steps, self.fields = steps, {"channels": channels}

    def points(self, codes: Tensor) -> Tensor:
        """Times and the latents with noise in them, [B, n, TIMES, 1 + C]."""
        clean = codes.float()[:, :, None].expand(-1, -1, TIMES, -1)
        t = torch.rand(clean.shape[:-1], device=clean.device)
        t = torch.where(torch.arange(TIMES, device=t.device) == TIMES - 1, 1 / self.steps, t)[..., None]
        return torch.cat((t, noisy(clean, torch.randn_like(clean), t)[0]), -1)

    def head(
        self, target: Target, network: Target | EagleDrafter, features: Tensor, points: Tensor
    ) -> Tensor:
        """The Gaussians of v by the network's own head, [R, n, TIMES (1 + 2 C)]."""
        assert isinstance(network, DiffusionTarget | DiffusionDrafter)
        points = points.repeat(len(features) // len(points), 1, 1, 1)
        conditions = network.denoiser.conditions(features)[..., None, :]
        v, log_std = network.denoiser(points[..., 1:], points[..., 0], conditions)
        return torch.cat((torch.zeros_like(v[..., 0]), v.flatten(-2), log_std.flatten(-2)), -1)

    def soft_cross_entropy(self, q: Tensor, p: Tensor) -> Tensor:
        """Nats a number that q lies from p: the mean divergence of their Gaussians."""
        own, other = (GaussianMixture.of(law.float(), self.channels) for law in (p, q))
        spread = (2 * own.log_std).exp() + (own.mean - other.mean).square()
        return (other.log_std - own.log_std + (spread * (-2 * other.log_std).exp() - 1) / 2).mean()

    def acceptance(self, q: Tensor, p: Tensor) -> Tensor:
        """The chance that a draft is kept if both trajectories come to the same place before their last step."""
        last = [
            torch.cat(
                (torch.zeros_like(law.log_weight[..., :1]), law.mean[..., -1, :], law.log_std[..., -1, :]), -1
            )
            for law in (GaussianMixture.of(x, self.channels) for x in (q, p))
        ]
        return super().acceptance(*last)

    def agreement(self, q: Tensor, p: Tensor) -> Tensor:
        """The share of the variance of the target's v that the drafter's explains."""
        own, other = (GaussianMixture.of(x, self.channels).mean for x in (p, q))
        return 1 - (own - other).square().mean() / own.var()


def laws_of(target: Target, name: str) -> CodeLaws:
    """Those of what a target predicts, with a loss of `LOSSES`. InputError where there is no such loss."""
    if isinstance(target, DiffusionTarget):
        return DiffusionLaws(name, target.channels, target.config.denoising_steps)
    return LatentLaws(name, target.channels) if target.channels else CodeLaws(name)
