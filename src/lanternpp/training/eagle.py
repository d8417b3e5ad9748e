"""Training of an EAGLE drafter (arXiv 2401.15077): the target's next feature, and with it its next code or latent."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.drafters.eagle import DIFFUSION_DRAFTER, DiffusionDrafter, EagleDrafter
from lanternpp.engine.latents import GaussianMixture, MixtureGuidance
from lanternpp.engine.sampling import Guidance
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.models.latents import DiffusionTarget, noisy
from lanternpp.training.codes import Codes, CodesTask
from lanternpp.training.drafter import DrafterTask
from lanternpp.training.features import FeatureCache, causal_mask, drafter_inputs, slot_inputs
from lanternpp.training.loop import team
from lanternpp.training.options import DrafterSettings, TrainingData
from lanternpp.training.teacher import Teacher

TIMES = 4  # at which diffusion heads are compared at every place; the last is the time of their last step
SAMPLES = 4  # latents drawn from the target at every place, by which integrals are estimated


class CodeComparison:
    """Distributions over codes, given by logits [..., V]."""

    kind = "eagle"  # of the drafter that is trained
    drafter: type[EagleDrafter] = EagleDrafter

    def __init__(self, loss: str):
        self.name = loss
        self.fields: dict[str, Any] = {}  # of the drafter's config, besides its decoder's

    def guidance(self, scale: float) -> Guidance:
        """Classifier-free guidance of this scale."""
        return Guidance(scale)

    def points(self, codes: Tensor) -> Tensor:
        """Where the distributions of codes [B, n, ...] are compared, [B, n, ...]; here nowhere in particular."""
        return codes

    def head(
        self, target: Target, network: Target | EagleDrafter, features: Tensor, points: Tensor
    ) -> Tensor:
        """Features [R, n, D] that a target or its drafter predicts -> distributions [R, n, P]; points [B, n, ...]."""
        return target.head(features)

    def loss(self, q: Tensor, p: Tensor) -> Tensor:
        """The loss on the drafter's q beside the target's p; `lk` is -log of the acceptance, `both` the sum."""
        loss = q.new_zeros(()) if self.name == "lk" else self.cross_entropy(q, p)
        return loss - self.acceptance(q, p).log().mean() if self.name in ("lk", "both") else loss

    def cross_entropy(self, q: Tensor, p: Tensor) -> Tensor:
        """Mean nats of q under p."""
        return -(p.float().softmax(-1) * q.float().log_softmax(-1)).sum(-1).mean()

    def acceptance(self, q: Tensor, p: Tensor) -> Tensor:
        """The chance that a draft from q is accepted, [...]: the sum of min(p, q), at least the smallest with a logarithm."""
        both = torch.minimum(q.float().softmax(-1), p.float().softmax(-1)).sum(-1)
        return both.clamp_min(torch.finfo(both.dtype).tiny)

    def agreement(self, q: Tensor, p: Tensor) -> Tensor:
        """How often both have the same likeliest code."""
        return (p.argmax(-1) == q.argmax(-1)).double().mean()


class LatentComparison(CodeComparison):
    """Mixtures over latents, given by parameters [..., P]; integrals are estimated by a few latents drawn from p."""

    def __init__(self, loss: str, channels: int):
        super().__init__(loss)
        if loss not in ("paper", "guided"):
            raise InputError(f"loss {loss!r} takes an integral over latents: choose paper or guided.")
        self.channels = channels

    def guidance(self, scale: float) -> Guidance:
        """Guidance of the mixtures' parameters."""
        return MixtureGuidance(scale, self.channels)

    def log_probs(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of q and p at latents drawn from p, [..., SAMPLES] each."""
        with torch.no_grad():
            u = torch.rand(*p.shape[:-1], SAMPLES, 1 + self.channels, device=p.device)
            latents = GaussianMixture.of(p.float(), self.channels).draw(u.clamp(1e-6, 1 - 1e-6))
        log_q, log_p = (
            GaussianMixture.of(x.float()[..., None, :], self.channels).log_prob(latents) for x in (q, p)
        )
        return log_q, log_p

    def cross_entropy(self, q: Tensor, p: Tensor) -> Tensor:
        """Mean nats of a number of a latent under q, the latents drawn from p."""
        return -self.log_probs(q, p)[0].mean() / self.channels

    def acceptance(self, q: Tensor, p: Tensor) -> Tensor:
        """The mean of min(1, q / p) under p, which is the chance that a draft from q is accepted."""
        log_q, log_p = self.log_probs(q, p)
        return (log_q - log_p).clamp(max=0).exp().mean(-1).clamp_min(1e-6)

    def agreement(self, q: Tensor, p: Tensor) -> Tensor:
        """How often both have the same heaviest component."""
        first, second = (GaussianMixture.of(x, self.channels).log_weight.argmax(-1) for x in (q, p))
        return (first == second).double().mean()


class DiffusionComparison(LatentComparison):
    """Predictions of diffusion heads for the same noisy latents: a Gaussian of v for each, compared like components of a mixture."""

    kind = DIFFUSION_DRAFTER
    drafter = DiffusionDrafter

    def __init__(self, loss: str, channels: int, steps: int):
        super().__init__(loss, channels)
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

    def cross_entropy(self, q: Tensor, p: Tensor) -> Tensor:
        """Nats a number that q lies from p: the mean divergence of their Gaussians."""
        own, other = (GaussianMixture.of(x.float(), self.channels) for x in (p, q))
        spread = (2 * own.log_std).exp() + (own.mean - other.mean).square()
        return (other.log_std - own.log_std + (spread * (-2 * other.log_std).exp() - 1) / 2).mean()

    def acceptance(self, q: Tensor, p: Tensor) -> Tensor:
        """The chance that a draft is accepted if both trajectories come to the same place before their last step."""
        last = []
        for mixture in (GaussianMixture.of(q, self.channels), GaussianMixture.of(p, self.channels)):
            ends = mixture.mean[..., -1, :], mixture.log_std[..., -1, :]
            last.append(torch.cat((torch.zeros_like(mixture.log_weight[..., :1]), *ends), -1))
        return super().acceptance(*last)

    def agreement(self, q: Tensor, p: Tensor) -> Tensor:
        """The share of the variance of the target's v that the drafter's explains."""
        own, other = (GaussianMixture.of(x, self.channels).mean for x in (p, q))
        return 1 - (own - other).square().mean() / own.var()


def comparison_of(target: Target, loss: str) -> CodeComparison:
    """The comparison for a target's predictions. InputError where there is no such loss for it."""
    if isinstance(target, DiffusionTarget):
        return DiffusionComparison(loss, target.channels, target.config.denoising_steps)
    return LatentComparison(loss, target.channels) if target.channels else CodeComparison(loss)


class EagleTask(CodesTask, DrafterTask):
    """An EAGLE drafter. The target's features are computed from codes in every step, or read from a cache."""

    check_pictures = 96
    name = "drafter"
    keep = "lk"
    model: EagleDrafter
    average: EagleDrafter

    def __init__(self, settings: Any, teacher: Teacher, codes: Codes, source: TrainingData | None = None):
        super().__init__(settings, teacher, codes)
        known = teacher, self.train, codes.train, codes.key
        self.cached = FeatureCache(*known) if source is not None and source.cache_features else None

    @classmethod
    def check(cls, settings: DrafterSettings, target: Target, source: TrainingData) -> None:
        """Whether there is such a loss for the target's predictions, and features of codes to cache."""
        comparison_of(target, settings.loss or "")
        if target.length == 1:
            raise InputError(
                "--kind eagle drafts what follows the first code, and these pictures have one code."
            )
        if settings.rounds >= target.length:
            raise InputError(
                f"--rounds {settings.rounds} is too many for pictures of {target.length} codes: use at most {target.length - 1}."
            )
        if source.cache_features and target.channels:
            raise InputError(
                "--cache-features is of codes, and the latents of pictures are drawn anew in every step."
            )

    def make(self) -> EagleDrafter:
        """The drafter, as its target's last block where it inherits."""
        self.comparison = comparison_of(self.target, self.hparams.loss)
        self.kind = self.comparison.kind
        self.guidance = self.comparison.guidance(1.0 if self.hparams.loss == "paper" else self.hparams.cfg)
        shape, made = self.target.decoder.config, self.comparison.drafter
        config = made.config_class.like(shape, self.hparams.layers, **self.comparison.fields)
        drafter = made(config, self.target.decoder.rotary_table)
        if self.hparams.inherit:
            drafter.inherit(self.target)
        return drafter

    def make_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """AdamW."""
        weights, rate = self.model.parameters(), self.hparams.lr
        return {"model": torch.optim.AdamW(weights, rate, (0.9, 0.95), weight_decay=0.0, fused=True)}

    def losses(self, index: Tensor, variant: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """`loss` and its two parts, `feature` and `distribution`."""
        dropped = None
        if self.hparams.loss == "paper":  # as the drafter then drafts under the unconditional prompt too
            drawn = torch.rand(self.sampler.batch, generator=generator)
            dropped = team().share(drawn < self.hparams.drop_captions)
        codes = self.target.from_cache(self.codes.train.pick(index, variant).to(self.device))
        branches = self.guidance.branches
        known = None
        if self.cached is not None:
            known = self.cached(index, variant, branches, dropped).to(self.device)
        feature, distribution = self.training_loss(*self.train(index, branches, dropped), codes, known)
        loss = feature + self.hparams.weight * distribution
        return {"loss": loss, "feature": feature, "distribution": distribution}

    def loss(
        self, prompts: Tensor, start: Tensor | None, codes: Tensor, known: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """prompts [R, T, D] from start [R] on, codes [B, length] -> loss on features, loss on distributions.

        known [R, S, D]: the target's features, if they are cached.
        """
        hparams, merge = self.hparams, self.guidance.merge
        settings = self.guidance, hparams.rounds, hparams.noise
        true, logits, rounds = self.drafts(self.model, prompts, start, codes, *settings, known)
        p, costs = merge(logits), []
        for skipped, (predicted, drafts) in enumerate(rounds):
            feature = F.smooth_l1_loss(predicted.float(), true[:, skipped:].float())
            costs.append(torch.stack((feature, self.comparison.loss(merge(drafts), p[:, skipped:]))))
        feature, distribution = torch.stack(costs).mean(0)
        return feature, distribution

    def drafts(
        self,
        drafter: EagleDrafter,
        prompts: Tensor,
        start: Tensor | None,
        codes: Tensor,
        guidance: Guidance,
        rounds: int,
        noise: float | None = None,
        known: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """The target's features [R, n, D] and distributions [R, n, P] at the codes after the first, and a drafter's in each round.

        A round after the first reads the drafter's own features of the round before (HASS, arXiv 2408.15766) and lacks
        one more code. noise: the width of uniform noise on the features that the first round reads.
        """
        head, target = self.comparison.head, self.target
        with torch.no_grad():
            rows = guidance.rows(codes)
            if known is None:
                next_inputs, features = drafter_inputs(target, prompts, rows, start)
            else:
                next_inputs, features = slot_inputs(target, prompts, rows)[:, 1:], known
            inputs = features
            if noise is not None:
                inputs = features + (torch.rand_like(features, dtype=torch.float32) - 0.5) * noise
            first, points = prompts.shape[1], self.comparison.points(codes[:, 1:])
            logits = head(target, target, features[:, first:], points)
        mask, found = causal_mask(start, next_inputs.shape[1]), []
        inputs = inputs[:, :-1].to(features.dtype)
        for skipped in range(rounds):
            every = drafter.forward_sequence(next_inputs, inputs, mask)
            predicted = every[:, first - 1 + skipped :]
            found.append((predicted, head(target, drafter, predicted, points[:, skipped:])))
            inputs = torch.cat((features[:, :first], every[:, first - 1 : -1].to(features.dtype)), 1)
        return features[:, first:], logits, found

    def validate_on(self, index: Tensor) -> dict[str, float]:
        """Expected acceptance after guidance (first draft level, and second), agreement of the best code, losses."""
        comparison = self.comparison
        guidance = comparison.guidance(self.hparams.cfg)
        sums = defaultdict[str, float](float)
        for part in index.split(8):
            found = self.codes.val.pick(part).to(self.device)
            codes = self.target.from_cache(found, torch.Generator().manual_seed(0))
            prompts = self.val(part, guidance.branches)
            with team().autocast(self.device):
                true, target_logits, rounds = self.drafts(self.average, *prompts, codes, guidance, 2)
            (predicted, logits), (_, second) = rounds
            p, q, q2 = (guidance.merge(x) for x in (target_logits, logits, second))
            drawn, count = [q, p, q2, p[:, 1:]], len(part)
            if not self.plain and not self.target.channels:
                after = torch.arange(1, self.target.length, device=self.device).expand(count, -1)
                drawn = [self.sampled(x, after[:, -x.shape[1] :]).log() for x in drawn]
            accepted, accepted2 = comparison.acceptance(*drawn[:2]), comparison.acceptance(*drawn[2:])
            figures = {
                "accept": accepted.mean(),
                "accept2": accepted2.mean(),
                "agree": comparison.agreement(q, p),
                "feature": F.smooth_l1_loss(predicted.float(), true.float()),
                "paper": comparison.cross_entropy(logits[:count], target_logits[:count]),
                "guided": comparison.cross_entropy(q, p),
                "lk": -accepted.log().mean(),
            }
            for name, value in figures.items():
                sums[name] += value.item() * count
        return {name: value / len(index) for name, value in sums.items()}
