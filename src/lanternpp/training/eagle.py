"""Training of an EAGLE drafter (arXiv 2401.15077): the target's next feature, and with it its next code or latent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from lanternpp.drafters.eagle import DiffusionDrafter, EagleDrafter
from lanternpp.drafters.parallel import branch_mask
from lanternpp.engine.latents import GaussianMixture, MixtureGuidance
from lanternpp.engine.sampling import Guidance
from lanternpp.errors import InputError, counted
from lanternpp.models.base import Target
from lanternpp.models.latents import DiffusionTarget, noisy
from lanternpp.nn.files import input_errors
from lanternpp.training.codes import REMEDY, Codes, CodesTask, Done, Shard, Split, build_shards
from lanternpp.training.drafter import CaptionPrompts, DrafterTask, drafter_inputs, slot_inputs
from lanternpp.training.options import DrafterSettings, TrainingData
from lanternpp.training.teacher import Teacher
from lanternpp.training.team import autocast, team
from lanternpp.util.files import digest

TIMES = 4  # random times at which diffusion heads are compared for each latent; the last is the time of their last step
MIN_ACCEPTANCE = 1e-6  # so that a place without any overlap counts 14 nats
SAMPLES = 4  # latents drawn from the target at every position to estimate an integral
SHARD_BYTES = 1 << 28  # of a shard of features, about
BATCH_SIZE = 8  # pictures whose features are computed at once


class CodeComparison:
    """Distributions over codes, given by logits [..., V]."""

    drafter: type[EagleDrafter] = EagleDrafter

    def __init__(self, loss: str):
        self.loss_name = loss

    def guidance(self, scale: float) -> Guidance:
        """Return classifier-free guidance of this scale."""
        return Guidance(scale)

    def points(self, codes: Tensor) -> Tensor:
        """Return the inputs [B, n, ...] that `head` needs besides features for codes [B, n, ...]; here it needs none."""
        return codes

    def head(self, target: Target, model: Target | EagleDrafter, features: Tensor, points: Tensor) -> Tensor:
        """Return distributions [R, n, P] of features [R, n, D] that a target or its drafter, `model`, predicts; points [B, n, ...]."""
        return target.head(features)

    def loss(self, q: Tensor, p: Tensor) -> Tensor:
        """Return the loss of the drafter's q against the target's p: cross-entropy; `lk`: -log of the acceptance; `both`: the sum."""
        loss = q.new_zeros(()) if self.loss_name == "lk" else self.cross_entropy(q, p)
        if self.loss_name in ("lk", "both"):
            loss = loss - self.acceptance(q, p).log().mean()
        return loss

    def cross_entropy(self, q: Tensor, p: Tensor) -> Tensor:
        """Return the mean cross-entropy of q under p in nats, a scalar."""
        return -(p.float().softmax(-1) * q.float().log_softmax(-1)).sum(-1).mean()

    def acceptance(self, q: Tensor, p: Tensor) -> Tensor:
        """Return the probability that a draft from q is accepted, [...]: the sum of min(p, q), at least `MIN_ACCEPTANCE`."""
        overlap = torch.minimum(q.float().softmax(-1), p.float().softmax(-1)).sum(-1)
        return overlap.clamp_min(MIN_ACCEPTANCE)

    def agreement(self, q: Tensor, p: Tensor) -> Tensor:
        """Return how often q and p have the same likeliest code, a scalar."""
        return (p.argmax(-1) == q.argmax(-1)).double().mean()


class LatentComparison(CodeComparison):
    """Mixtures over latents, given by parameters [..., P]; integrals are estimated by a few latents drawn from p."""

    def __init__(self, loss: str, channels: int):
        super().__init__(loss)
        if loss not in ("paper", "guided"):
            raise InputError(f"loss {loss!r} takes an integral over latents: choose paper or guided.")
        self.channels = channels

    def guidance(self, scale: float) -> Guidance:
        """Return guidance of the mixtures' parameters."""
        return MixtureGuidance(scale, self.channels)

    def log_probs(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """Return log q and log p at latents drawn from p, [..., SAMPLES] each."""
        with torch.no_grad():
            u = torch.rand(*p.shape[:-1], SAMPLES, 1 + self.channels, device=p.device)
            latents = GaussianMixture.of(p.float(), self.channels).draw(u.clamp(1e-6, 1 - 1e-6))
        q_mixture, p_mixture = (GaussianMixture.of(x.float()[..., None, :], self.channels) for x in (q, p))
        return q_mixture.log_prob(latents), p_mixture.log_prob(latents)

    def cross_entropy(self, q: Tensor, p: Tensor) -> Tensor:
        """Return the mean cross-entropy of q under p in nats per channel, estimated by latents drawn from p."""
        return -self.log_probs(q, p)[0].mean() / self.channels

    def acceptance(self, q: Tensor, p: Tensor) -> Tensor:
        """Return the mean of min(1, q / p) under p, which is the probability that a draft from q is accepted, [...]."""
        log_q, log_p = self.log_probs(q, p)
        return (log_q - log_p).clamp(max=0).exp().mean(-1).clamp_min(MIN_ACCEPTANCE)

    def agreement(self, q: Tensor, p: Tensor) -> Tensor:
        """Return how often q and p have the same heaviest component, a scalar."""
        q_best, p_best = (GaussianMixture.of(x, self.channels).log_weight.argmax(-1) for x in (q, p))
        return (q_best == p_best).double().mean()


class DiffusionComparison(LatentComparison):
    """Predictions of diffusion heads for the same noisy latents: a Gaussian of v for each, in the layout of a mixture."""

    drafter = DiffusionDrafter

    def __init__(self, loss: str, channels: int, steps: int):
        super().__init__(loss, channels)
        self.steps = steps

    def points(self, codes: Tensor) -> Tensor:
        """Return random times, and latents [B, n, C] with the noise of each time: [B, n, TIMES, 1 + C]."""
        latents = codes.float()[:, :, None].expand(-1, -1, TIMES, -1)  # [B, n, TIMES, C]
        t = torch.rand(latents.shape[:-1], device=latents.device)
        t = torch.where(torch.arange(TIMES, device=t.device) == TIMES - 1, 1 / self.steps, t)[..., None]
        return torch.cat((t, noisy(latents, torch.randn_like(latents), t)[0]), -1)

    def head(self, target: Target, model: Target | EagleDrafter, features: Tensor, points: Tensor) -> Tensor:
        """Return the Gaussians of v that the model's own head predicts, [R, n, TIMES (1 + 2 C)]."""
        assert isinstance(model, DiffusionTarget | DiffusionDrafter)
        points = points.repeat(len(features) // len(points), 1, 1, 1)
        conditions = model.denoiser.conditions(features)[..., None, :]
        v, log_std = model.denoiser(points[..., 1:], points[..., 0], conditions)
        return torch.cat((torch.zeros_like(v[..., 0]), v.flatten(-2), log_std.flatten(-2)), -1)

    def cross_entropy(self, q: Tensor, p: Tensor) -> Tensor:
        """Return the mean KL divergence of the Gaussians of q from the Gaussians of p, in nats per channel."""
        target, draft = (GaussianMixture.of(x.float(), self.channels) for x in (p, q))
        spread = (2 * target.log_std).exp() + (target.mean - draft.mean).square()
        return (draft.log_std - target.log_std + (spread * (-2 * draft.log_std).exp() - 1) / 2).mean()

    def acceptance(self, q: Tensor, p: Tensor) -> Tensor:
        """Return the probability that a draft is accepted if both trajectories reach the same latent before their last step, [...]."""
        last_steps = []
        for params in (q, p):
            mixture = GaussianMixture.of(params, self.channels)
            logit = torch.zeros_like(mixture.log_weight[..., :1])
            last_steps.append(torch.cat((logit, mixture.mean[..., -1, :], mixture.log_std[..., -1, :]), -1))
        return super().acceptance(*last_steps)

    def agreement(self, q: Tensor, p: Tensor) -> Tensor:
        """Return the share of the variance of the target's v that the drafter's v explains, a scalar."""
        target_v, draft_v = (GaussianMixture.of(x, self.channels).mean for x in (p, q))
        return 1 - (target_v - draft_v).square().mean() / target_v.var()


def comparison_of(target: Target, loss: str) -> CodeComparison:
    """Return the comparison for a target's predictions; raise InputError where the loss does not suit the target."""
    if isinstance(target, DiffusionTarget):
        return DiffusionComparison(loss, target.channels, target.config.denoising_steps)
    return LatentComparison(loss, target.channels) if target.channels else CodeComparison(loss)


class FeatureCache:
    """The target's features of all pictures of a split in their variants, with and without caption, on disk; missing ones are computed.

    codes_key: the key of the codes. InputError where the disk lacks room.
    """

    def __init__(self, teacher: Teacher, captions: CaptionPrompts, split: Split, codes_key: str):
        self.target, self.captions, self.split = captions.target, captions, split
        like = next(self.target.parameters())
        slots, dim = captions.slots + self.target.length - 1, self.target.decoder.config.dim
        picture_bytes = split.codes.shape[1] * 2 * slots * dim * like.element_size()
        self.shard_size = max(min(SHARD_BYTES // picture_bytes, len(split)), 1)
        facts = [teacher.origin, codes_key, str(like.dtype), str(captions.slots), str(self.shard_size)]
        folder = teacher.store / f"features-{digest([*facts, *split.texts])}"
        contents = "the features of all pictures"
        paths = build_shards(folder, len(split), self.shard_size, self._compute, contents)
        self.shards = []  # slices [M, variants, 2, S, D] of files, read on access
        for path in paths:
            with input_errors(f"{path} cannot be read", REMEDY):
                self.shards.append(safe_open(path, framework="pt").get_slice("features"))

    def __call__(self, index: Tensor, variant: Tensor, branches: int, drop: Tensor | None = None) -> Tensor:
        """Return the features of pictures index [B] in variants [B], [branches * B, S, D] on the CPU; unconditional where drop [B]."""
        rows = []
        for i, v in zip(index.tolist(), variant.tolist(), strict=True):
            shard, row = divmod(i, self.shard_size)
            rows.append(self.shards[shard][row : row + 1, v : v + 1][0, 0])
        conditional, unconditional = torch.stack(rows, 1)  # [B, S, D] each
        if drop is not None:
            conditional = torch.where(drop[:, None, None], unconditional, conditional)
        return torch.cat((conditional, unconditional)) if branches == 2 else conditional

    @torch.no_grad()
    def _compute(self, parts: Sequence[range], done: Done) -> Iterator[Shard]:
        device, dtype = self.target.decoder.rotary_table.device, next(self.target.parameters()).dtype
        num_done = 0
        for part in parts:
            batches = []
            for index in torch.arange(part.start, part.stop).split(BATCH_SIZE):
                prompts, start = self.captions(index, 2)
                variants = []
                for variant in range(self.split.codes.shape[1]):
                    codes = self.split.pick(index, torch.full_like(index, variant)).to(device)
                    with autocast(device):
                        _, features = drafter_inputs(self.target, prompts, codes.repeat(2, 1), start)
                    variants.append(torch.stack(features.chunk(2), 1).cpu())  # [B, 2, S, D]
                batches.append(torch.stack(variants, 1))
                num_done += len(index)
                done(num_done)
            yield {"features": torch.cat(batches).to(dtype)}, {"pictures": len(part)}


class EagleTask(CodesTask, DrafterTask):
    """An EAGLE drafter. The target's features are computed from codes in every step, or read from a cache."""

    check_pictures = 96
    name = "drafter"
    keep = "lk"
    model: EagleDrafter
    average: EagleDrafter

    def __init__(self, settings: Any, teacher: Teacher, codes: Codes, source: TrainingData | None = None):
        super().__init__(settings, teacher, codes)
        self.feature_cache: FeatureCache | None = None
        if source is not None and source.cache_features:
            self.feature_cache = FeatureCache(teacher, self.train, codes.train, codes.key)

    @classmethod
    def check(cls, settings: DrafterSettings, target: Target, source: TrainingData) -> None:
        """Check that the loss, the layers, the rounds and the cache suit the target; raise InputError if not."""
        comparison_of(target, settings.loss or "")
        # The layers of a target that transformers runs have other names.
        num_blocks = len(getattr(target.decoder, "blocks", ()))
        if settings.inherit and settings.layers > num_blocks:
            raise InputError(
                f"--inherit needs {counted(settings.layers, 'block')} of the target, as --layers says, and it has {num_blocks} of a "
                f"drafter's form: leave it out{' or use fewer --layers' if num_blocks else ''}."
            )
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
        """Build the drafter; where it inherits, with the target's last blocks, and an `fc` that passes features on."""
        shape = self.target.decoder.config
        self.comparison = comparison = comparison_of(self.target, self.hparams.loss)
        self.guidance = comparison.guidance(1.0 if self.hparams.loss == "paper" else self.hparams.cfg)
        fields = {"channels": self.target.channels} if comparison.drafter is DiffusionDrafter else {}
        config = comparison.drafter.config_class.like(shape, self.hparams.layers, **fields)
        drafter = comparison.drafter(config, self.target.decoder.rotary_table)
        if self.hparams.inherit:
            last_blocks = self.target.decoder.blocks[-self.hparams.layers :]
            drafter.decoder.blocks.load_state_dict(last_blocks.state_dict())
            with torch.no_grad():
                drafter.fc.weight[:, shape.dim :] += torch.eye(shape.dim)
        return drafter

    def make_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Build AdamW for all weights."""
        weights, lr = self.model.parameters(), self.hparams.lr
        return {"model": torch.optim.AdamW(weights, lr, (0.9, 0.95), weight_decay=0.0, fused=True)}

    def losses(self, index: Tensor, variant: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return `loss` and its two parts, `feature` and `distribution`."""
        drop = cached = None
        # Under loss paper the drafter drafts for the unconditional prompt too, so it learns from dropped captions.
        if self.hparams.loss == "paper":
            u = torch.rand(self.sampler.batch, generator=generator)
            drop = team().share(u < self.hparams.drop_captions)
        codes = self.target.from_cache(self.codes.train.pick(index, variant).to(self.device))
        branches = self.guidance.branches
        if self.feature_cache is not None:
            cached = self.feature_cache(index, variant, branches, drop).to(self.device)
        feature, distribution = self.training_loss(*self.train(index, branches, drop), codes, cached)
        loss = feature + self.hparams.weight * distribution
        return {"loss": loss, "feature": feature, "distribution": distribution}

    def loss(
        self, prompts: Tensor, start: Tensor | None, codes: Tensor, cached: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the losses on features and on distributions, of prompts [R, T, D] from start [R] on and codes [B, length].

        cached [R, S, D]: the target's features from the cache.
        """
        rounds, noise = self.hparams.rounds, self.hparams.noise
        features, drafts = self.draft(self.model, prompts, start, codes, rounds, noise, cached)
        points, losses = self.comparison.points(codes[:, 1:]), []
        with torch.no_grad():
            p = self.guided(self.guidance, self.target, features, points)  # [B, n, P]
        for skipped, predicted in enumerate(drafts):
            feature = F.smooth_l1_loss(predicted.float(), features[:, skipped:].float())
            q = self.guided(self.guidance, self.model, predicted, points[:, skipped:])
            losses.append(torch.stack((feature, self.comparison.loss(q, p[:, skipped:]))))
        feature, distribution = torch.stack(losses).mean(0)
        return feature, distribution

    def guided(
        self, guidance: Guidance, model: Target | EagleDrafter, features: Tensor, points: Tensor
    ) -> Tensor:
        """Return the guided distributions [B, n, P] of a model's features [R, n, D]; points [B, n, ...]."""
        head, target = self.comparison.head, self.target
        if type(guidance) is Guidance and target.head_linear is not None:
            # The logits of guided features are the guided logits.
            return head(target, model, guidance.merge(features).to(features.dtype), points).float()
        return guidance.merge(head(target, model, features, points))

    def draft(
        self,
        drafter: EagleDrafter,
        prompts: Tensor,
        start: Tensor | None,
        codes: Tensor,
        rounds: int,
        noise: float | None = None,
        cached: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the target's features [R, n, D] of the codes after the first, and the drafter's in each round.

        A round predicts one code less than the round before. As in decoding and HASS (arXiv 2408.15766), it reads the features that the
        rounds before predicted, one each, and the target's of all earlier codes. noise: the width of uniform noise on the target's.
        """
        with torch.no_grad():
            rows = torch.cat([codes] * (len(prompts) // len(codes)))
            if cached is None:
                next_inputs, features = drafter_inputs(self.target, prompts, rows, start)
            else:
                next_inputs, features = slot_inputs(self.target, prompts, rows)[:, 1:], cached
            inputs = features
            if noise is not None:
                inputs = features + (torch.rand_like(features, dtype=torch.float32) - 0.5) * noise
        features, nodes = features[:, prompts.shape[1] :], inputs[:, :-1].to(features.dtype)
        slots = anchors = slot = anchor = torch.arange(nodes.shape[1], device=nodes.device)[None]
        past: list[tuple[Tensor, Tensor]] = []
        drafts: list[Tensor] = []
        for count in range(features.shape[1], features.shape[1] - rounds, -1):
            mask = None
            if drafts or start is not None:
                mask = branch_mask(slots, anchors, start)[:, :, -nodes.shape[1] :]
            drafted = drafter.forward_sequence(next_inputs[:, slot[0]], nodes, slot, mask, past=past)
            predicted = drafted[:, -count:]
            drafts.append(predicted)
            # Each of these features is read at the next slot, in a chain after the slot whose feature is the target's last.
            nodes = predicted[:, :-1].to(features.dtype)
            slot, anchor = slot[:, 1 - count :], anchor[:, -count:-1]
            slots, anchors = torch.cat((slots, slot), 1), torch.cat((anchors, anchor), 1)
        return features, drafts

    def validate_on(self, index: Tensor) -> dict[str, float]:
        """Return expected acceptance after guidance (of one round and of a second), agreement of the best code, and losses."""
        comparison = self.comparison
        guidance = comparison.guidance(self.hparams.cfg)
        sums = defaultdict[str, float](float)
        for part in index.split(8):
            stored = self.codes.val.pick(part).to(self.device)
            codes = self.target.from_cache(stored, torch.Generator().manual_seed(0))
            prompts = self.val(part, guidance.branches)
            points, count = comparison.points(codes[:, 1:]), len(part)
            with autocast(self.device):
                features, (predicted, second) = self.draft(self.average, *prompts, codes, 2)
                p = self.guided(guidance, self.target, features, points)
                q = self.guided(guidance, self.average, predicted, points)
                q2 = self.guided(guidance, self.average, second, points[:, 1:])
                p_logits = comparison.head(self.target, self.target, features[:count], points)
                q_logits = comparison.head(self.target, self.average, predicted[:count], points)
            sampled = [q, p, q2, p[:, 1:]]
            if not self.samples_softmax and not self.target.channels:
                positions = torch.arange(1, self.target.length, device=self.device).expand(count, -1)
                sampled = [self.sampling_probs(x, positions[:, -x.shape[1] :]).log() for x in sampled]
            acceptance, acceptance2 = comparison.acceptance(*sampled[:2]), comparison.acceptance(*sampled[2:])
            figures = {
                "accept": acceptance.mean(),
                "accept2": acceptance2.mean(),
                "agree": comparison.agreement(q, p),
                "feature": F.smooth_l1_loss(predicted.float(), features.float()),
                "paper": comparison.cross_entropy(q_logits, p_logits),
                "guided": comparison.cross_entropy(q, p),
                "lk": -acceptance.log().mean(),
            }
            for name, value in figures.items():
                sums[name] += value.item() * count
        return {name: value / len(index) for name, value in sums.items()}
