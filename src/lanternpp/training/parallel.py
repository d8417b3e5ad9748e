"""Training of a parallel drafter: every level of a draft at once, on guided features, from many anchors.

With x_1 .. x_g drawn from the drafter's q, block verification (`engine/verify/joint.py`) decides 1 + sum E[w_i] codes, where
w_i = exp(s_i - max_{j <= i} s_j) and s_i is the sum of the log ratios log p_j(x_j) / q_j(x_j) up to level i, s_0 = 0.
As p = q exp(s), the same expectation is also an expectation over chains that the target drew:

    E_q[w_i] = E_p[exp(-max_{j <= i} s_j)]

After each code of a recorded picture, the next codes are such a chain, so the number of decided codes is estimated without
drawing a draft; the estimate sums over all values of a chain's last code, not only the recorded one. Where pictures are not
the target's own, it still grows to its maximum, g + 1, as q goes to p. The acceptance of a level is such a sum, whose gradient
is weighted by the number of codes that depend on that level (`chain_gain`). The ratios at the recorded codes have no gradient:
a drafter that may raise q there learns the recorded codes by heart, and drafts no better.

The same chains train the drafter to predict acceptance. A draft code is accepted, given that the codes before it are, with
probability w_i / w_{i-1}, whose mean over the code is sum_y min(p_i(y), q_i(y) / w_{i-1}). A chain is drafted and accepted
before level i with the probability that the target draws it, times exp(-max_{j < i} s_j).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.training.codes import evenly_spaced
from lanternpp.training.drafter import CaptionPrompts, DrafterTask, drafter_inputs
from lanternpp.training.loop import muon_and_adamw
from lanternpp.training.options import DrafterSettings, TrainingData
from lanternpp.training.team import autocast

VALIDATION_ANCHORS = 20  # drafts in each validation picture, about
FIRST_LEVEL_WEIGHT = 0.5  # of the loss of the first level at `firsts` slots
MAX_EXPONENT = 60.0  # limit of arguments of exp, which overflows float32 at 89
MIN_PROBABILITY = 1e-6  # lower limit of arguments of log


def chain_acceptance(p: Tensor, log_q: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities, along chains that the target drew, that a draft reaches each level and is accepted there, [..., g].

    The first, exp(-max_{j < i} s_j), is relative to the probability that the target draws the chain; the product of both
    estimates the mean w_1 .. w_g of drafts. Only the second is differentiable, in log_q of its own level. p and log_q
    [..., g, V] follow every code of the chain; codes [..., g] are drawn from p.
    """
    index = codes[..., None]
    log_p = p.gather(-1, index).clamp(min=torch.finfo(p.dtype).tiny).log()
    log_ratio = log_q.detach().gather(-1, index) - log_p  # [..., g, 1]: log q_i(x_i) / p_i(x_i)
    sums = F.pad(log_ratio[..., 0].cumsum(-1)[..., :-1], (1, 0))  # [..., g]: -s_{i - 1}
    min_sums = sums.cummin(-1).values  # -max_{j < i} s_j, at most 0, since s_0 = 0
    inverse_w = (sums - min_sums).clamp(max=MAX_EXPONENT).exp()[..., None]  # 1 / w_{i - 1}
    return min_sums.exp(), torch.minimum(p, inverse_w * log_q.exp()).sum(-1)


def chain_gain(survival: Tensor, acceptance: Tensor) -> Tensor:
    """Return the log of the number of codes, 1 + sum of survival [..., g], that drafts decide, differentiable in acceptance [..., g].

    A level's acceptance is a factor of its own survival and of the survival of all levels after it.
    """
    survival = survival.detach()
    num_codes = 1 + survival.sum()
    num_dependent = survival.flip(-1).cumsum(-1).flip(-1)
    gain = (num_dependent * acceptance.clamp(min=MIN_PROBABILITY).log()).sum() / num_codes
    return num_codes.log() + gain - gain.detach()


def level_loss(name: str, p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of this name in `DrafterSettings`, and the acceptance, of p and log_q [..., V] at each level: [...] both."""
    acceptance = torch.minimum(log_q.exp(), p).sum(-1)
    loss = torch.zeros_like(acceptance)
    if name != "lk":
        loss = loss - (p * log_q).sum(-1)
    if name in ("lk", "both"):
        loss = loss - acceptance.clamp(min=torch.finfo(acceptance.dtype).tiny).log()
    return loss, acceptance.detach()


@dataclass(frozen=True)
class DraftBatch:
    """Inputs of B pictures: S slots, the first T of the prompt. Drafts of `levels` codes begin after A slots, the anchors."""

    prompts: Tensor  # [R, T, D] conditional rows first; B rows where the target's pass is not needed
    start: Tensor | None  # [R] slots where prompts begin; None: all at slot 0
    codes: Tensor  # [B, S - T + 1]
    next_inputs: Tensor  # [B, S - 1, D] the input after each slot
    features: Tensor  # [B, S, (1 + aux) D] guided, float32
    anchors: Tensor  # [B, A] slots
    hints: Tensor | None = None  # [B, S - 1 + A * (levels - 1), D]
    unguided: Tensor | None = None  # [R, S, D] features before guidance, in a validation

    @property
    def last_layer(self) -> Tensor:
        """The features of the target's last layer, [B, S, D], without those of auxiliary layers."""
        return self.features[..., : self.next_inputs.shape[-1]]


def spread_aux_layers(count: int, layers: int) -> tuple[int, ...]:
    """Return `count` of the layers 0 .. layers - 2, evenly spread; raise InputError where there are fewer."""
    if count >= layers:
        raise InputError(
            f"--aux-layers {count} is too many: the target has {layers - 1} layers below its last."
        )
    return tuple(layers * (i + 1) // (count + 1) - 1 for i in range(count))


def gather_slots(x: Tensor, slot: Tensor) -> Tensor:
    """Return x [B, S, D] at slots [B, ...], as [B, ..., D]; slots beyond the last one are clamped to it."""
    slot = slot.clamp(max=x.shape[1] - 1)
    return x.gather(1, slot.flatten(1)[..., None].expand(-1, -1, x.shape[-1])).unflatten(1, slot.shape[1:])


class ParallelTask(DrafterTask):
    """A parallel drafter."""

    name = "parallel"
    keep = "rejected"
    check_pictures = 64
    model: ParallelDrafter
    average: ParallelDrafter

    @classmethod
    def check(cls, settings: DrafterSettings, target: Target, source: TrainingData) -> None:
        """Check that the target has codes, and enough layers for `aux_layers`; raise InputError if not."""
        spread_aux_layers(settings.aux_layers, target.decoder.config.layers)
        if target.channels:
            raise InputError(
                "the model draws continuous latents, which drafters of --kind eagle alone predict."
            )

    def make(self) -> ParallelDrafter:
        """Build the drafter; its layers for codes, hints and confidence begin at zero."""
        settings, shape = self.hparams, self.target.decoder.config
        fields = {"queries": settings.levels - 1, "turn": settings.condition_width, "confidence": True}
        aux_layers = spread_aux_layers(settings.aux_layers, shape.layers)
        config = ParallelConfig.like(shape, settings.layers, aux_layers=aux_layers, **fields)
        drafter = ParallelDrafter(config, self.target.decoder.rotary_table).float()
        for name, parameter in drafter.named_parameters():
            if name.startswith(("hint.", "up.", "confidence.weight")):
                nn.init.zeros_(parameter)
        return drafter

    def make_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Build Muon for the matrices, and AdamW for the other weights."""
        excluded = ("queries", "confidence.weight")
        matrices = [p for name, p in self.model.named_parameters() if p.dim() == 2 and name not in excluded]
        return muon_and_adamw(self.model, matrices, self.hparams.muon_lr, self.hparams.lr, decay=0.01)

    def anchors(self, length: int, generator: torch.Generator | None) -> Tensor:
        """Return the indices [A] of the codes after which a step drafts, of `length`; without a generator those of a validation."""
        if generator is not None:
            return torch.randperm(length - 1, generator=generator)[: self.hparams.anchors].sort()[0]
        num_codes = max(length - self.hparams.levels, 3) - 2
        return torch.arange(2, 2 + num_codes, max(num_codes // VALIDATION_ANCHORS, 1))

    def batch(
        self,
        captions: CaptionPrompts,
        index: Tensor,
        variant: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> DraftBatch:
        """Return the inputs of pictures index [B] in variants [B]; without a generator those of a validation, with `unguided`."""
        codes = captions.split.pick(index, variant).to(self.device)
        anchor_codes = self.anchors(codes.shape[1], generator)
        prompts, start = captions(index, self.guidance.branches)
        with torch.no_grad():
            rows, aux_layers = self.guidance.rows(codes), self.config.aux_layers
            next_inputs, features = drafter_inputs(self.target, prompts, rows, start, aux_layers)
        anchors = (prompts.shape[1] - 1 + anchor_codes).to(self.device).expand(len(codes), -1)
        guided = self.guidance.merge(features)
        unguided = features[..., : next_inputs.shape[-1]] if generator is None else None
        next_inputs = next_inputs[: len(codes)]  # the drafter has conditional rows only
        return DraftBatch(prompts, start, codes, next_inputs, guided, anchors, unguided=unguided)

    def losses(self, index: Tensor, variant: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return `loss`, `confidence` and `accept` of `loss`."""
        batch = self.batch(self.train, index, variant, generator)
        noise = (torch.rand_like(batch.last_layer) - 0.5) * self.hparams.noise
        # Random slots of every picture after which only the first level is learned.
        order = torch.rand(len(batch.codes), batch.codes.shape[1] - 1, device=self.device).argsort(1)
        firsts = order[:, : self.hparams.firsts] + batch.prompts.shape[1] - 1
        return self.training_loss(self.model, batch, noise, firsts)

    def loss(
        self,
        drafter: ParallelDrafter,
        batch: DraftBatch,
        noise: Tensor | None = None,
        firsts: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the scalars `loss` and `confidence`, whose sum a step minimises, and `accept`, the mean acceptance; and, of each
        level [levels], `levels`, its acceptance, `kept`, E[w_i], and `expected`, the drafter's prediction of E[w_i].

        confidence: the loss of the predicted acceptance, whose gradient reaches the predicting layer only. firsts [B, n]: slots
        after which the loss counts the first level too.
        """
        # The slots [B, A, levels] whose features predict the drafts; some may lie beyond the picture's last slot.
        slots = batch.anchors[..., None] + 1 + torch.arange(self.hparams.levels, device=batch.anchors.device)
        last_slot = batch.features.shape[1] - 1
        level_slots, in_picture = slots.clamp(max=last_slot), (slots <= last_slot).float()
        first_level, features = self.level_features(drafter, batch, noise)
        p, log_q = self.distributions(batch, level_slots, features)
        losses, acceptance = level_loss(self.hparams.loss, p, log_q)
        num_drafts = in_picture.sum((0, 1)).clamp(min=1)  # [levels]
        weights = self.hparams.fade ** torch.arange(len(num_drafts), device=num_drafts.device)
        loss = ((losses * in_picture).sum((0, 1)) / num_drafts * weights).sum() / weights.sum()
        codes = batch.codes.gather(1, level_slots.flatten(1) + 1 - batch.prompts.shape[1]).view_as(slots)
        if self.hparams.loss == "block":
            reach, chain_accept = chain_acceptance(p, log_q, codes)
            loss = loss - chain_gain(reach * chain_accept * in_picture / num_drafts, chain_accept)
        if firsts is not None:
            first_p, first_log_q = self.distributions(batch, firsts + 1, gather_slots(first_level, firsts))
            loss = loss + FIRST_LEVEL_WEIGHT * level_loss(self.hparams.loss, first_p, first_log_q)[0].mean()
        with torch.no_grad():
            if batch.unguided is None and not self.samples_softmax:
                p, log_q = self.p_and_log_q(batch, level_slots, p.clamp(min=1e-38).log(), log_q)
            reach, chain_accept = chain_acceptance(p, log_q, codes)
        reach = reach * in_picture
        assert drafter.confidence is not None
        logits = drafter.confidence(features.detach())[..., 0].float()  # [B, A, levels]
        # The cross-entropy of a prediction is weighted by how often drafts reach its level.
        labels = chain_accept.clamp(0, 1).float()
        confidence = F.binary_cross_entropy_with_logits(logits, labels, reduction="none") * reach
        confidence = confidence.sum() / reach.sum().clamp(min=1e-6)
        by_level = {
            "levels": acceptance * in_picture,
            "kept": reach * chain_accept,
            "expected": reach * logits.detach().sigmoid(),
        }
        means = {name: x.sum((0, 1)) / num_drafts for name, x in by_level.items()}
        return {"loss": loss, "confidence": confidence, "accept": means["levels"].mean(), **means}

    def distributions(self, batch: DraftBatch, slots: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return p of the target at slots [B, ...], and log q of the drafter's features [B, ..., D] there: [B, ..., V] both.

        Training takes the head of guided features, which are the guided logits where the head is linear; a validation merges
        logits, and samples as drawing does.
        """
        dtype = batch.next_inputs.dtype
        with torch.no_grad():
            if batch.unguided is not None:
                target_features = gather_slots(batch.unguided, self.guidance.rows(slots)).to(dtype)
                p_logits = self.guidance.merge(self.target.head(target_features))
                q_logits = self.target.head(features).float()
                return self.p_and_log_q(batch, slots, p_logits, q_logits)
            p = self.target.head(gather_slots(batch.last_layer, slots).to(dtype)).float().softmax(-1)
        return p, self.target.head(features).float().log_softmax(-1)

    def p_and_log_q(self, batch: DraftBatch, slots: Tensor, *logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return p and log q that codes at slots [B, A, levels] are sampled from, of the logits of p and of q, [B, A, levels, V]."""
        positions = slots.flatten(1) + 1 - batch.prompts.shape[1]
        p, q = (self.sampling_probs(x.flatten(1, 2), positions).view_as(x) for x in logits)
        return p, q.clamp(min=1e-20).log()

    def level_features(
        self, drafter: ParallelDrafter, batch: DraftBatch, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the drafter's features of the first level after all slots, [B, S - 1, D], and of every level after the anchors,
        [B, A, levels, D], each conditioned on the recorded code before it. noise [B, S, D] is added to the features of the target's
        last layer.
        """
        inputs = batch.features
        if noise is not None:
            inputs = torch.cat((batch.last_layer + noise, inputs[..., noise.shape[-1] :]), -1)
        inputs = inputs[:, :-1].to(batch.next_inputs.dtype)
        # The drafter has conditional rows only.
        start = None if batch.start is None else batch.start[: len(batch.codes)]
        first_level, further_levels = drafter.forward_sequence(
            batch.next_inputs, inputs, batch.anchors, self.hparams.levels - 1, start, batch.hints
        )
        anchors = batch.anchors[..., None]  # [B, A, 1]
        level = torch.arange(1, self.hparams.levels, device=anchors.device)
        prev_embeds = gather_slots(batch.next_inputs, anchors + level)
        conditioned = drafter.condition_on(further_levels, prev_embeds)
        return first_level, torch.cat((gather_slots(first_level, anchors), conditioned), 2)

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Return how much of drafts after held-out codes is accepted, estimated as in training.

        codes: the codes that block verification decides per draft, 1 + sum of `kept`, E[w_i] by level; predicted: the same sum of
        `expected`, the drafter's prediction of `kept`; rejected: the codes of a draft that are not accepted; chain: the codes that
        a walk from the root would decide if levels were independent; accept: the mean acceptance of a level after recorded codes.
        """
        index, sums = evenly_spaced(len(self.codes.val), self.check_pictures), []
        for part in index.split(8):
            batch = self.batch(self.val, part)
            with autocast(self.device):
                by_level = self.loss(self.average, batch)
            sums.append(torch.stack([by_level[name] for name in ("kept", "expected", "levels")]) * len(part))
        kept, expected, accept = torch.stack(sums).sum(0) / len(index)
        codes = 1 + kept.sum().item()
        figures: dict[str, Any] = {"codes": codes, "predicted": 1 + expected.sum().item()}
        figures |= {"rejected": 1 + len(kept) - codes, "chain": 1 + accept.cumprod(0).sum().item()}
        for name, values in (("kept", kept), ("expected", expected), ("accept", accept)):
            figures[name] = [round(value, 4) for value in values.tolist()]
        return figures
