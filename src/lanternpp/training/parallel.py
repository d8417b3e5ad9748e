"""Training of a parallel drafter: every level of a draft at once, on guided features, from many anchors.

With x_1 .. x_g drawn from the drafter's q, block verification (`engine/verify/joint.py`) decides 1 + sum E[w_i] codes, where
w_i = exp(s_i - max_{j <= i} s_j) and s_i is the sum of the log ratios log p_j(x_j) / q_j(x_j) up to level i, s_0 = 0.
The same expectation is one over chains that the target drew, as p = q exp(s):

    E_q[w_i] = E_p[exp(-max_{j <= i} s_j)]

A recorded picture is such a chain after each of its codes. So the codes of a draft can be estimated without drawing one; the
last code of each chain is summed over all its values, not only the recorded one. Where pictures are not the target's own, the
estimate still grows to its greatest value, g + 1, as q goes to p. The probability that a level is kept is such a
sum; its gradient is weighted by the codes that depend on that level (`chain_gain`). The ratios at the recorded codes themselves are taken as they
are: a drafter that may raise q there learns the recorded codes by heart, and drafts no better.

The same chains train the drafter to predict acceptance. A draft is accepted, given that those before it are, with
probability w_i / w_{i-1}, whose mean over the draft is sum_y min(p_i(y), q_i(y) / w_{i-1}); a chain comes so far, and is
accepted so far, as often as the target draws it, times exp(-max_{j < i} s_j).
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
from lanternpp.training.drafter import DrafterTask
from lanternpp.training.features import CaptionPrompts, drafter_inputs, spread_aux_layers
from lanternpp.training.loop import muon_and_adamw, team
from lanternpp.training.options import DrafterSettings, TrainingData

PLACES = 20  # of a picture that a validation drafts from, about
FIRST = 0.5  # weight of the loss of the first level at more slots
FURTHEST = 60.0  # exp of more is not computed, as it may be infinite
SMALLEST = 1e-6  # chance whose logarithm is taken


def keep_chances(p: Tensor, log_q: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Along chains that the target drew: how often drafts come there, relative to it, and accept the next draft code then, [..., g].

    The product estimates the mean w_1 .. w_g of drafts. Only the second is differentiable, in log_q of its own level. p and
    log_q [..., g, V] after every code of the chain; codes [..., g], drawn from p.
    """
    at = codes[..., None]
    gain = log_q.detach().gather(-1, at) - p.gather(-1, at).clamp(min=torch.finfo(p.dtype).tiny).log()
    before = F.pad(gain[..., 0].cumsum(-1)[..., :-1], (1, 0))  # -s_{i - 1}
    least = before.cummin(-1).values  # at most 0, which is that of the root
    more = (before - least).clamp(max=FURTHEST).exp()[..., None]
    return least.exp(), torch.minimum(p, more * log_q.exp()).sum(-1)


def chain_gain(kept: Tensor, keep: Tensor) -> Tensor:
    """Log of the codes 1 + sum of kept [..., g] that drafts decide, to be differentiated in keep [..., g].

    A level's chance `keep` is a factor of its own `kept` and of those of all levels after it.
    """
    kept = kept.detach()
    codes, depend = 1 + kept.sum(), kept.flip(-1).cumsum(-1).flip(-1)
    gain = (depend * keep.clamp(min=SMALLEST).log()).sum() / codes
    return codes.log() + gain - gain.detach()


def level_cost(loss: str, p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of this name in `DrafterSettings` and the acceptance at each place, [...], of p and log_q [..., V]."""
    chance = torch.minimum(log_q.exp(), p).sum(-1)
    cost = torch.zeros_like(chance)
    if loss != "lk":
        cost = cost - (p * log_q).sum(-1)
    if loss in ("lk", "both"):
        cost = cost - chance.clamp(min=torch.finfo(chance.dtype).tiny).log()
    return cost, chance.detach()


@dataclass(frozen=True)
class DraftBatch:
    """Inputs of B pictures: S slots, the first T of them the prompt's. Drafts of `levels` codes begin after A slots, the anchors."""

    prompts: Tensor  # [R, T, D] the conditional ones first; those of B rows where no pass of the target will be needed
    start: Tensor | None  # [R] where prompts begin; None: all at slot 0
    codes: Tensor  # [B, S - T + 1]
    next_inputs: Tensor  # [B, S - 1, D] the input after each slot
    features: Tensor  # [B, S, (1 + aux) D] guided, float32
    anchors: Tensor  # [B, A] slots
    hints: Tensor | None = None  # [B, S - 1 + A * (levels - 1), D]
    rows: Tensor | None = None  # [R, S, D] the features before guidance, where drafts are measured exactly


def gather_slots(x: Tensor, slot: Tensor) -> Tensor:
    """x [B, S, D] at slots [B, ...] -> [B, ..., D]; slots beyond the last are the last."""
    slot = slot.clamp(max=x.shape[1] - 1)
    return x.gather(1, slot.flatten(1)[..., None].expand(-1, -1, x.shape[-1])).unflatten(1, slot.shape[1:])


class ParallelTask(DrafterTask):
    """A parallel drafter."""

    name = kind = "parallel"
    keep = "rejected"
    check_pictures = 64
    model: ParallelDrafter
    average: ParallelDrafter

    @classmethod
    def check(cls, settings: DrafterSettings, target: Target, source: TrainingData) -> None:
        """Whether the target has codes, and as many layers as are read."""
        spread_aux_layers(settings.aux_layers, target.decoder.config.layers)
        if target.channels:
            raise InputError(
                "the model draws continuous latents, which drafters of --kind eagle alone predict."
            )

    def make(self) -> ParallelDrafter:
        """The drafter; the layers for codes, hints and the confidence begin at zero."""
        settings, shape = self.hparams, self.target.decoder.config
        more = {"queries": settings.levels - 1, "turn": settings.condition_width, "confidence": True}
        aux_layers = spread_aux_layers(settings.aux_layers, shape.layers)
        config = ParallelConfig.like(shape, settings.layers, aux_layers=aux_layers, **more)
        drafter = ParallelDrafter(config, self.target.decoder.rotary_table).float()
        for name, parameter in drafter.named_parameters():
            if name.startswith(("hint.", "up.", "confidence.weight")):
                nn.init.zeros_(parameter)
        return drafter

    def make_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Muon for the matrices, AdamW for the rest."""
        others = ("queries", "confidence.weight")
        matrices = [p for name, p in self.model.named_parameters() if p.dim() == 2 and name not in others]
        return muon_and_adamw(self.model, matrices, self.hparams.muon_lr, self.hparams.lr, decay=0.01)

    def anchors(self, length: int, generator: torch.Generator | None) -> Tensor:
        """The codes of `length` after which a step drafts, [A], or a validation, for which there is no generator."""
        if generator is not None:
            return torch.randperm(length - 1, generator=generator)[: self.hparams.anchors].sort()[0]
        places = max(length - self.hparams.levels, 3) - 2
        return torch.arange(2, 2 + places, max(places // PLACES, 1))

    def batch(
        self,
        captions: CaptionPrompts,
        index: Tensor,
        variant: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> DraftBatch:
        """Inputs of pictures index [B] in variants [B]; without a generator those of a validation, to be measured exactly."""
        codes = captions.split.pick(index, variant).to(self.device)
        pick = self.anchors(codes.shape[1], generator)
        prompts, start = captions(index, self.guidance.branches)
        with torch.no_grad():
            rows = self.guidance.rows(codes)
            next_inputs, features = drafter_inputs(
                self.target, prompts, rows, start, aux_layers=self.config.aux_layers
            )
        anchors = (prompts.shape[1] - 1 + pick).to(self.device).expand(len(codes), -1)
        guided = self.guidance.merge(features)
        last = features[..., : next_inputs.shape[-1]] if generator is None else None
        return DraftBatch(prompts, start, codes, next_inputs[: len(codes)], guided, anchors, rows=last)

    def losses(self, index: Tensor, variant: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """`loss`, `confidence` and `accept`, as of `loss`."""
        batch = self.batch(self.train, index, variant, generator)
        last = batch.features[..., : batch.next_inputs.shape[-1]]
        noise = (torch.rand_like(last) - 0.5) * self.hparams.noise
        # Random slots of every picture after which the first level alone is learned.
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
        """`loss` and `confidence`, whose sum a step minimises; `accept`, the mean acceptance; of each level [levels], `levels`,
        its acceptance, `kept`, E[w_i], and `expected`, the prediction of it.

        confidence: the loss of predicting the accepted codes, which moves the layer that predicts alone. firsts [B, n]: slots
        after which the first level alone counts too.
        """
        # [B, A, levels]: the slots that decide the codes of drafts, of which some may lie beyond the picture's last
        slots = batch.anchors[..., None] + 1 + torch.arange(self.hparams.levels, device=batch.anchors.device)
        last = batch.features.shape[1] - 1
        level_slots, in_picture = slots.clamp(max=last), (slots <= last).float()
        first_level, features = self.level_features(drafter, batch, noise)
        features = self.conditioned(drafter, batch, features)
        p, log_q = self.distributions(batch, level_slots, features)
        cost, chance = (x * in_picture for x in level_cost(self.hparams.loss, p, log_q))
        counted = in_picture.sum((0, 1)).clamp(min=1)
        fade = self.hparams.fade ** torch.arange(len(counted), device=counted.device)
        loss = (cost.sum((0, 1)) / counted * fade).sum() / fade.sum()
        codes = batch.codes.gather(1, level_slots.flatten(1) + 1 - batch.prompts.shape[1]).view_as(slots)
        if self.hparams.loss == "block":
            reach, keep = keep_chances(p, log_q, codes)
            loss = loss - chain_gain(reach * keep * in_picture / counted, keep)
        if firsts is not None:
            first = gather_slots(first_level, firsts)
            at_firsts = self.distributions(batch, firsts + 1, first)
            loss = loss + FIRST * level_cost(self.hparams.loss, *at_firsts)[0].mean()
        with torch.no_grad():
            if batch.rows is None and not self.plain:
                p, log_q = self.drawn(batch, level_slots, p.clamp(min=1e-38).log(), log_q)
            reach, keep = keep_chances(p, log_q, codes)
        assert drafter.confidence is not None
        logits, reach = drafter.confidence(features.detach())[..., 0].float(), reach * in_picture
        # cross-entropy of the predictions, weighted by how often drafts come there
        kept = keep.clamp(0, 1).float()
        confidence = F.binary_cross_entropy_with_logits(logits, kept, reduction="none") * reach
        confidence = confidence.sum() / reach.sum().clamp(min=1e-6)
        by_level = {
            "levels": chance,
            "kept": reach * keep,
            "expected": reach * logits.detach().sigmoid(),
        }
        found = {name: x.sum((0, 1)) / counted for name, x in by_level.items()}
        return {"loss": loss, "confidence": confidence, "accept": found["levels"].mean(), **found}

    def distributions(self, batch: DraftBatch, slots: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """At slots [B, ...], p of the target and log q of features [B, ..., D], both [B, ..., V].

        Training takes the head of guided features, which are the guided logits where the head is linear; a validation merges
        logits, and samples as drawing does.
        """
        like = batch.next_inputs
        with torch.no_grad():
            if batch.rows is not None:
                truth = gather_slots(batch.rows, self.guidance.rows(slots)).to(like.dtype)
                logits = self.guidance.merge(self.target.head(truth)), self.target.head(features).float()
                return self.drawn(batch, slots, *logits)
            truth = gather_slots(batch.features[..., : like.shape[-1]], slots)
            p = self.target.head(truth.to(like.dtype)).float().softmax(-1)
        return p, self.target.head(features).float().log_softmax(-1)

    def drawn(self, batch: DraftBatch, slots: Tensor, *logits: Tensor) -> tuple[Tensor, Tensor]:
        """p and log q that codes at slots [B, A, levels] are drawn from, of logits of both, [B, A, levels, V]."""
        place = slots.flatten(1) + 1 - batch.prompts.shape[1]
        p, q = (self.sampled(x.flatten(1, 2), place).view_as(x) for x in logits)
        return p, q.clamp(min=1e-20).log()

    def conditioned(self, drafter: ParallelDrafter, batch: DraftBatch, features: Tensor) -> Tensor:
        """Features [B, A, levels, D] of `level_features`, each conditioned on the recorded code before it."""
        level = torch.arange(1, self.hparams.levels, device=features.device)
        before = gather_slots(batch.next_inputs, batch.anchors[..., None] + level)
        return torch.cat((features[:, :, :1], drafter.condition_on(features[:, :, 1:], before)), 2)

    def level_features(
        self, drafter: ParallelDrafter, batch: DraftBatch, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Features of the first level after all slots, [B, S - 1, D], and of every level after the anchors, [B, A, levels, D].

        These are not conditioned on a code yet.
        """
        levels, next_inputs = self.hparams.levels - 1, batch.next_inputs
        inputs = batch.features
        if noise is not None:
            inputs = torch.cat((inputs[..., : noise.shape[-1]] + noise, inputs[..., noise.shape[-1] :]), -1)
        inputs = inputs[:, :-1].to(next_inputs.dtype)
        # the drafter has the conditional rows alone
        start = None if batch.start is None else batch.start[: len(batch.codes)]
        first_level, further_levels = drafter.forward_sequence(
            next_inputs, inputs, batch.anchors, levels, start, batch.hints
        )
        at_anchors = gather_slots(first_level, batch.anchors[..., None])
        return first_level, torch.cat((at_anchors, further_levels), 2)

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """The accepted part of drafts after held-out codes, estimated as in training.

        codes: those that block verification decides per draft, 1 + sum of `kept`, E[w_i] by level; predicted: the same of
        `expected`, the drafter's prediction of that; rejected: the drafted codes of a draft that are not accepted; chain:
        the codes that a walk from the root would decide if the levels were independent; accept: the mean acceptance of
        each level after recorded codes.
        """
        found, index = [], evenly_spaced(len(self.codes.val), self.check_pictures)
        for part in index.split(8):
            batch = self.batch(self.val, part)
            with team().autocast(self.device):
                figures = self.loss(self.average, batch)
            by_level = torch.stack([figures[name] for name in ("kept", "expected", "levels")])
            found.append(by_level * len(part))
        kept, expected, accept = torch.stack(found).sum(0) / len(index)
        codes, predicted = (1 + x.sum().item() for x in (kept, expected))
        chain, rejected = 1 + accept.cumprod(0).sum().item(), 1 + len(kept) - codes
        levels = {"kept": kept, "expected": expected, "accept": accept}
        lists = {name: [round(value, 4) for value in x.tolist()] for name, x in levels.items()}
        return {"codes": codes, "predicted": predicted, "rejected": rejected, "chain": chain, **lists}
