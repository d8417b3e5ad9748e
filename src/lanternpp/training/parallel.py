"""Training of a parallel drafter: every level of a draft at once, on guided features, from many anchors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lanternpp.drafters.base import mark
from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.training import hardware
from lanternpp.training.data import BatchSampler, evenly_spaced
from lanternpp.training.drafts import (
    DraftBatch,
    DraftFigures,
    DraftMeasure,
    chain_gain,
    confidence_loss,
    gather_slots,
    keep_chances,
    level_cost,
    rounded,
)
from lanternpp.training.features import CaptionPrompts, drafter_inputs, spread_aux_layers
from lanternpp.training.material.codes import Codes, VariantSampler
from lanternpp.training.material.gather import gather
from lanternpp.training.material.samples import SelfSampling
from lanternpp.training.run import Task, TrainingOptions, averaged, run
from lanternpp.training.task import check_rates, muon_and_adamw
from lanternpp.training.team import team

LOSSES = ("guided", "lk", "both", "block")
MOST_LEVELS = 64
PLACES = 20  # of a picture that a validation drafts from, about
FIRST = 0.5  # weight of the loss of the first level at more slots


@dataclass(frozen=True)
class ParallelSettings:
    """Hyperparameters: all that decides the result, except the budget and the machine.

    The loss of a level is cross-entropy to the target's guided distribution (`guided`), -log of the acceptance
    (`lk`), or the sum of both (`both`); level l counts `fade` ** l. `block` is `guided` and, for the chain as a whole,
    -log of the codes that block verification would decide of a draft (`drafts.keep_chances`).
    """

    loss: Literal["guided", "lk", "both", "block"] = "both"
    cfg: float = 3.0
    batch_size: int = 16
    lr: float = 2e-3  # AdamW: queries, norms, biases
    muon_lr: float = 8e-3  # Muon: the matrices, in AdamW's scale
    levels: int = 14  # codes of a draft
    anchors: int = 20  # slots of a picture behind which a step drafts
    firsts: int = 128  # slots of a picture behind which a step learns the first level alone, besides
    fade: float = 0.88
    noise: float = 0.1  # width of the uniform noise that is added to features
    turn: int = 256
    aux_layers: int = 0  # layers of the target below its last that are read too, evenly spread
    seed: int = 0
    decay: float = 0.995
    warmup: int = 50

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise InputError(f"loss {self.loss!r} is unknown: choose {', '.join(LOSSES)}.")
        check_rates(lr=self.lr, muon_lr=self.muon_lr)
        if not 2 <= self.levels <= MOST_LEVELS:
            raise InputError(f"levels {self.levels} must be 2 to {MOST_LEVELS}.")
        if self.aux_layers < 0:
            raise InputError(f"aux_layers {self.aux_layers} must be at least 0.")
        if not 0 < self.fade <= 1:
            raise InputError(f"fade {self.fade} must be above 0, and 1 at most: 1 counts all levels alike.")


class ParallelTask(Task):
    """A parallel drafter for a frozen target."""

    name = "parallel"
    keep = "refused"
    model: ParallelDrafter
    average: ParallelDrafter

    def __init__(
        self,
        settings: ParallelSettings,
        layers: int,
        target: Target,
        codes: Codes,
        origin: str,
        device: torch.device,
        sampling: Sampling | None = None,
    ):
        torch.manual_seed(settings.seed)
        self.hparams, self.codes, self.device = settings, codes, device
        self.guidance = Guidance(settings.cfg)
        self.measure = DraftMeasure(target, self.guidance, sampling or Sampling())
        self.data, self.decay, self.warmup = codes.data, settings.decay, settings.warmup
        self.target = target.to(device).eval().requires_grad_(False)
        shape = target.decoder.config
        aux_layers = spread_aux_layers(settings.aux_layers, shape.layers)
        self.config = ParallelConfig.like(
            shape,
            layers,
            queries=settings.levels - 1,
            turn=settings.turn,
            aux_layers=aux_layers,
            confidence=True,
        )
        facts = {"data": codes.data["codes"], "target": origin}
        self.settings = {**self.config.flat(), **asdict(settings), **facts}
        self.model = ParallelDrafter(self.config, target.decoder.rotary_table).float().to(device).train()
        for name, parameter in self.model.named_parameters():
            if name.startswith(("hint.", "up.", "confidence.weight")):
                nn.init.zeros_(parameter)
        self.average = averaged(self.model)  # type: ignore[assignment]
        others = ("queries", "confidence.weight")
        matrices = [p for name, p in self.model.named_parameters() if p.dim() == 2 and name not in others]
        self.optimizers = muon_and_adamw(self.model, matrices, settings.muon_lr, settings.lr, decay=0.01)
        self.sampler = VariantSampler(
            BatchSampler(len(codes.train), settings.batch_size, settings.seed), codes.train.codes.shape[1]
        )
        self.train, self.val = CaptionPrompts(target, codes.train), CaptionPrompts(target, codes.val)
        self.training_loss = self.loss

    def speed_up(self) -> None:
        """Compile drafter, head and loss as one graph of one shape. Validations have other shapes and are not compiled."""
        self.training_loss = torch.compile(self.loss, fullgraph=True, dynamic=False)

    def draft_batch(self, captions: CaptionPrompts, index: Tensor, codes: Tensor, pick: Tensor) -> DraftBatch:
        """Inputs of pictures index [B] with codes [B, length], drafted behind the codes pick [A]."""
        prompts, start = captions(index, self.guidance.branches)
        with torch.no_grad():
            rows = self.guidance.rows(codes)
            next_inputs, features = drafter_inputs(
                self.target, prompts, rows, start, aux_layers=self.config.aux_layers
            )
        anchors = (prompts.shape[1] - 1 + pick).to(self.device).expand(len(codes), -1)
        guided = self.guidance.merge(features)
        return DraftBatch(prompts, start, codes, next_inputs[: len(codes)], guided, anchors)

    def training_batch(self, step: int) -> DraftBatch:
        """The inputs of a training step."""
        index, variant, generator = self.sampler(step)
        index, variant = team().share(index), team().share(variant)
        codes = self.codes.train.pick(index, variant).to(self.device)
        pick = torch.randperm(codes.shape[1] - 1, generator=generator)[: self.hparams.anchors].sort()[0]
        return self.draft_batch(self.train, index, codes, pick)

    def validation_batches(self) -> Iterator[DraftBatch]:
        """The inputs of a validation."""
        for part in evenly_spaced(len(self.codes.val), 64).split(8):
            codes = self.codes.val.pick(part, torch.zeros_like(part)).to(self.device)
            places = max(codes.shape[1] - self.hparams.levels, 3) - 2
            pick = torch.arange(2, 2 + places, max(places // PLACES, 1))
            yield self.draft_batch(self.val, part, codes, pick)

    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        """One update."""
        with hardware.autocast(self.device):
            batch = self.training_batch(step)
            last = batch.features[..., : batch.next_inputs.shape[-1]]
            noise = (torch.rand_like(last) - 0.5) * self.hparams.noise
            figures = self.training_loss(self.model, batch, noise, self.first_slots(batch))
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        (figures["loss"] + figures["confidence"]).backward()
        team().average(self.model)
        named = self.model.named_parameters()
        nn.utils.clip_grad_norm_([p for name, p in named if not name.startswith("confidence")], 0.5)
        for optimizer in self.optimizers.values():
            optimizer.step()
        return {name: value for name, value in figures.items() if value.dim() == 0}

    def first_slots(self, batch: DraftBatch) -> Tensor:
        """Random slots of every picture behind which codes are decided, [B, firsts], or all of them."""
        order = torch.rand(len(batch.codes), batch.codes.shape[1] - 1, device=self.device).argsort(1)
        return order[:, : self.hparams.firsts] + batch.prompts.shape[1] - 1

    def loss(
        self,
        drafter: ParallelDrafter,
        batch: DraftBatch,
        noise: Tensor | None = None,
        firsts: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """`loss` and `confidence`, whose sum a step minimises; `accept`, the mean acceptance; `levels`, that of each level [levels].

        confidence: the loss of predicting what is kept, which moves the layer that predicts alone. firsts: as of `first_slots`.
        """
        level_slots, in_picture = batch.level_slots(self.hparams.levels)
        first_level, features = self.level_features(drafter, batch, noise)
        features = self.conditioned(drafter, batch, features)
        p, log_q = self.distributions(batch, level_slots.flatten(1), features.flatten(1, 2))
        cost, chance = (x.view_as(in_picture) * in_picture for x in level_cost(self.hparams.loss, p, log_q))
        counted = in_picture.sum((0, 1)).clamp(min=1)
        fade = self.hparams.fade ** torch.arange(len(counted), device=counted.device)
        loss = (cost.sum((0, 1)) / counted * fade).sum() / fade.sum()
        codes = batch.codes.gather(1, level_slots.flatten(1) + 1 - batch.prompts.shape[1])
        chains = (x.unflatten(1, in_picture.shape[1:]) for x in (p, log_q, codes))
        by_block = self.hparams.loss == "block"
        with torch.set_grad_enabled(by_block and torch.is_grad_enabled()):
            reach, keep = keep_chances(*chains)
        if by_block:
            loss = loss - chain_gain(reach * keep * in_picture / counted, keep)
        if firsts is not None:
            first = gather_slots(first_level, firsts[..., None])[:, :, 0]
            at_firsts = self.distributions(batch, firsts + 1, first)
            loss = loss + FIRST * level_cost(self.hparams.loss, *at_firsts)[0].mean()
        levels = chance.sum((0, 1)) / counted
        confidence = confidence_loss(drafter, features, reach * in_picture, keep)
        return {"loss": loss, "confidence": confidence, "accept": levels.mean(), "levels": levels}

    def distributions(self, batch: DraftBatch, slots: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """At slots [B, n], p of the target and log q of features [B, n, D], both [B, n, V]."""
        like = batch.next_inputs
        with torch.no_grad():
            truth = gather_slots(batch.features[..., : like.shape[-1]], slots[..., None])[:, :, 0]
            p = self.target.head(truth.to(like.dtype)).float().softmax(-1)
        return p, self.target.head(features).float().log_softmax(-1)

    def conditioned(self, drafter: ParallelDrafter, batch: DraftBatch, features: Tensor) -> Tensor:
        """Features [B, A, levels, D] of `level_features`, each conditioned on the recorded code before it."""
        level = torch.arange(1, self.hparams.levels, device=features.device)
        before = gather_slots(batch.next_inputs, batch.anchors[..., None] + level)
        return torch.cat((features[:, :, :1], drafter.condition_on(features[:, :, 1:], before)), 2)

    def level_features(
        self, drafter: ParallelDrafter, batch: DraftBatch, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Features of the first level behind all slots, [B, S - 1, D], and of every level behind the anchors, [B, A, levels, D].

        These are not conditioned on a code yet.
        """
        levels, next_inputs = self.hparams.levels - 1, batch.next_inputs
        inputs = batch.features
        if noise is not None:
            inputs = torch.cat((inputs[..., : noise.shape[-1]] + noise, inputs[..., noise.shape[-1] :]), -1)
        inputs = inputs[:, :-1].to(next_inputs.dtype)
        first_level, further_levels = drafter.forward_sequence(
            next_inputs, inputs, batch.anchors, levels, batch.drafter_start, batch.hints
        )
        at_anchors = gather_slots(first_level, batch.anchors[..., None])
        return first_level, torch.cat((at_anchors, further_levels), 2)

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """What is kept of drafts that are drawn behind held-out codes.

        Besides the figures of `DraftFigures`, chain: the codes that a walk from the root would decide if the levels were
        independent; accept: the mean acceptance of each level behind recorded codes.
        """
        found, drafts = [], DraftFigures()
        generator = torch.Generator().manual_seed(self.hparams.seed)
        for batch in self.validation_batches():
            with hardware.autocast(self.device):
                found.append(self.loss(self.average, batch)["levels"])
                in_picture = batch.level_slots(self.hparams.levels)[1]
                _, features = self.level_features(self.average, batch)
                drafts.add(*self.measure.weights(self.average, features, batch, generator), in_picture)
        accept = torch.stack(found).mean(0)
        chain = 1 + accept.cumprod(0).sum().item()
        return {**drafts.result(), "chain": chain, "accept": rounded(accept)}

    @torch.no_grad()
    def sample(self, path: Path) -> None:
        """Draws nothing: the acceptances of `validate` say enough."""

    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The averaged drafter."""
        return {
            "kind": "parallel",
            **self.config.flat(),
            "target": mark(self.target),
        }, self.average.state_dict()


def train(
    data: Path | None,
    model: str | Path,
    layers: int,
    settings: ParallelSettings,
    options: TrainingOptions,
    crops: int = 2,
    limit: int | None = None,
    self_sampling: SelfSampling | None = None,
    follow: bool = False,
) -> bool:
    """Train a parallel drafter of `model` in the folder of `options`; False if interrupted. See `drafter.train`."""
    if layers < 1:
        raise InputError(f"layers {layers} must be at least 1.")
    known = asdict(settings) | {"layers": layers}

    def check(target: Target) -> None:
        spread_aux_layers(settings.aux_layers, target.decoder.config.layers)

    found = gather(model, options, data, self_sampling, known, follow, crops, limit, check)
    settings = replace(settings, cfg=found.cfg)
    known_target = found.target, found.codes, found.origin, options.device, found.sampling
    return run(ParallelTask(settings, layers, *known_target), options)
