"""How a drafter's training compares the drafter's distributions with the target's: over codes, or over latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lanternpp.continuous.mixture import Mixture, MixtureGuidance
from lanternpp.engine.guidance import Guidance
from lanternpp.errors import InputError
from lanternpp.targets.base import Target
from lanternpp.training import losses

LOSSES: dict[str, Any] = {
    "paper": losses.soft_cross_entropy,
    "guided": losses.soft_cross_entropy,
    "lk": losses.lk_loss,
    "both": losses.cross_entropy_and_lk,
}
SAMPLES = 4  # latents drawn from the target at every place, by which integrals are estimated


class CodeLaws:
    """Distributions over codes, given by logits [..., V]."""

    tree = "eagle-25"  # on which acceptance is measured

    def __init__(self, name: str):
        self.name = name

    def guidance(self, scale: float) -> Guidance:
        """Classifier-free guidance of this scale."""
        return Guidance(scale)

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
            law = Mixture.of(p.float(), self.channels)
            u = torch.rand(*p.shape[:-1], SAMPLES, 1 + self.channels, device=p.device)
            latents = law.draw(u.clamp(1e-6, 1 - 1e-6))
        other, own = (Mixture.of(x.float()[..., None, :], self.channels).log_prob(latents) for x in (q, p))
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
        first, second = (Mixture.of(x, self.channels).log_weight.argmax(-1) for x in (q, p))
        return (first == second).double().mean()


def laws_of(target: Target, name: str) -> CodeLaws:
    """Those of what a target predicts, with a loss of `LOSSES`. InputError where there is no such loss."""
    return LatentLaws(name, target.channels) if target.channels else CodeLaws(name)
