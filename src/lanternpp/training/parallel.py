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
from lanternpp.errors import InputError
from lanternpp.targets.base import Target
from lanternpp.training import hardware
from lanternpp.training.data import BatchSampler, evenly_spaced
from lanternpp.training.features import CaptionPrompts, drafter_inputs
from lanternpp.training.material.codes import Codes, VariantSampler
from lanternpp.training.material.gather import gather
from lanternpp.training.material.samples import SelfSampling
from lanternpp.training.run import Task, TrainingOptions, averaged, run
from lanternpp.training.team import team


@dataclass(frozen=True)
class ParallelSettings:
    """Hyperparameters: all that decides the result, except the budget and the machine.

    The loss of a level is cross-entropy to the target's guided distribution (`guided`), -log of the acceptance
    (`lk`), or the sum of both (`both`); level l counts `fade` ** l.
    """

    loss: Literal["guided", "lk", "both"] = "both"
    cfg: float = 3.0
    batch_size: int = 16
    lr: float = 2e-3
    levels: int = 8  # codes of a draft
    anchors: int = 32  # slots of a picture behind which a step drafts
    fade: float = 0.85
    noise: float = 0.1  # width of the uniform noise that is added to features
    turn: int = 256
    seed: int = 0
    decay: float = 0.995
    warmup: int = 50

    def __post_init__(self) -> None:
        if self.loss not in ("guided", "lk", "both"):
            raise InputError(f"loss {self.loss!r} is unknown: choose guided, lk, both.")


@dataclass(frozen=True)
class DraftBatch:
    """Inputs of B pictures: S slots, the first T of them the prompt's. Drafts of `levels` codes begin behind A slots, the anchors."""

    next_inputs: Tensor  # [B, S - 1, D] the input after each slot
    features: Tensor  # [B, S, D] guided, float32
    first: int  # T
    start: Tensor | None  # [B] where prompts begin; None: all at slot 0
    anchors: Tensor  # [B, A] slots
    hints: Tensor | None = None  # [B, S - 1 + A * (levels - 1), D]


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
    ):
        torch.manual_seed(settings.seed)
        self.hparams, self.codes, self.device = settings, codes, device
        self.guidance = Guidance(settings.cfg)
        self.data, self.decay, self.warmup = codes.data, settings.decay, settings.warmup
        self.target = target.to(device).eval().requires_grad_(False)
        shape = target.decoder.config
        self.config = ParallelConfig.like(shape, layers, queries=settings.levels - 1, turn=settings.turn)
        self.settings = {
            **self.config.flat(),
            **asdict(settings),
            "data": codes.data["codes"],
            "target": origin,
        }
        self.model = ParallelDrafter(self.config, target.decoder.rotary_table).float().to(device).train()
        nn.init.zeros_(self.model.hint.weight)
        nn.init.zeros_(self.model.up.weight)
        nn.init.zeros_(self.model.up.bias)
        self.average = averaged(self.model)  # type: ignore[assignment]
        matrices = [p for name, p in self.model.named_parameters() if p.dim() == 2 and name != "queries"]
        others = [p for name, p in self.model.named_parameters() if p.dim() != 2 or name == "queries"]
        self.optimizers = {
            "model": torch.optim.AdamW(
                [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
                settings.lr,
                (0.9, 0.95),
                fused=True,
            )
        }
        self.sampler = VariantSampler(
            BatchSampler(len(codes.train), settings.batch_size, settings.seed), codes.train.codes.shape[1]
        )
        self.train, self.val = CaptionPrompts(target, codes.train), CaptionPrompts(target, codes.val)

    def draft_batch(self, captions: CaptionPrompts, index: Tensor, codes: Tensor, pick: Tensor) -> DraftBatch:
        """Inputs of pictures index [B] with codes [B, length], drafted behind the codes pick [A]."""
        prompts, start = captions(index, self.guidance.branches)
        with torch.no_grad():
            next_inputs, features = drafter_inputs(self.target, prompts, self.guidance.rows(codes), start)
        count, first = len(codes), prompts.shape[1]
        prompt_start = None if start is None else start[:count]
        anchors = (first - 1 + pick).to(self.device).expand(count, -1)
        return DraftBatch(next_inputs[:count], self.guidance.merge(features), first, prompt_start, anchors)

    def training_batch(self, step: int) -> DraftBatch:
        """The inputs of a training step."""
        index, variant, generator = self.sampler(step)
        index, variant = team().share(index), team().share(variant)
        codes = self.codes.train.pick(index, variant).to(self.device)
        places = codes.shape[1] - self.hparams.levels
        pick = torch.randperm(places, generator=generator)[: self.hparams.anchors].sort()[0]
        return self.draft_batch(self.train, index, codes, pick)

    def validation_batches(self) -> Iterator[DraftBatch]:
        """The inputs of a validation."""
        for part in evenly_spaced(len(self.codes.val), 64).split(8):
            codes = self.codes.val.pick(part, torch.zeros_like(part)).to(self.device)
            pick = torch.arange(2, codes.shape[1] - self.hparams.levels, 13)
            yield self.draft_batch(self.val, part, codes, pick)

    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        """One update."""
        with hardware.autocast(self.device):
            batch = self.training_batch(step)
            noise = (torch.rand_like(batch.features) - 0.5) * self.hparams.noise
            figures = self.loss(self.model, batch, noise)
        optimizer = self.optimizers["model"]
        optimizer.zero_grad()
        figures["loss"].backward()
        team().average(self.model)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        optimizer.step()
        return {name: value for name, value in figures.items() if value.dim() == 0}

    def loss(
        self, drafter: ParallelDrafter, batch: DraftBatch, noise: Tensor | None = None
    ) -> dict[str, Tensor]:
        """`loss`, which a step minimises; `accept`, the mean acceptance; `levels`, that of each level [levels]."""
        slots, width = batch.features.shape[1:]
        level = torch.arange(self.hparams.levels, device=batch.anchors.device)
        level_slots = batch.anchors[..., None] + 1 + level  # [B, A, levels] slots
        in_picture = (level_slots < slots).float()
        place = level_slots.clamp(max=slots - 1).flatten(1)[..., None].expand(-1, -1, width)
        dtype = batch.next_inputs.dtype
        with torch.no_grad():
            p = self.target.head(batch.features.gather(1, place).to(dtype)).float().softmax(-1)
        cost, chance = self.cost(
            self.target.head(self.predict_features(drafter, batch, noise).flatten(1, 2)), p
        )
        cost, chance = (x.view_as(in_picture) * in_picture for x in (cost, chance))
        counted = in_picture.sum((0, 1)).clamp(min=1)
        fade = self.hparams.fade**level
        loss = (cost.sum((0, 1)) / counted * fade).sum() / fade.sum()
        levels = chance.sum((0, 1)) / counted
        return {"loss": loss, "accept": levels.mean(), "levels": levels}

    def predict_features(
        self, drafter: ParallelDrafter, batch: DraftBatch, noise: Tensor | None = None
    ) -> Tensor:
        """Features of every level behind the anchors, [B, A, levels, D]."""
        levels, next_inputs = self.hparams.levels - 1, batch.next_inputs
        inputs = batch.features if noise is None else batch.features + noise
        inputs = inputs[:, :-1].to(next_inputs.dtype)
        first_level, further_levels = drafter.forward_sequence(
            next_inputs, inputs, batch.anchors, levels, batch.start, batch.hints
        )

        def gather_slots(x: Tensor, slot: Tensor) -> Tensor:
            slot = slot.clamp(max=x.shape[1] - 1)
            return x.gather(1, slot.flatten(1)[..., None].expand(-1, -1, x.shape[-1])).unflatten(
                1, slot.shape[1:]
            )

        level = torch.arange(1, self.hparams.levels, device=next_inputs.device)
        before = gather_slots(next_inputs, batch.anchors[..., None] + level)
        return torch.cat(
            (
                gather_slots(first_level, batch.anchors[..., None]),
                drafter.condition_on(further_levels, before),
            ),
            2,
        )

    def cost(self, logits: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """logits and p [..., V] -> the loss and the acceptance at each place, [...]."""
        log_q = logits.float().log_softmax(-1)
        chance = torch.minimum(log_q.exp(), p).sum(-1)
        loss = torch.zeros_like(chance)
        if self.hparams.loss != "lk":
            loss = loss - (p * log_q).sum(-1)
        if self.hparams.loss != "guided":
            loss = loss - chance.log()
        return loss, chance.detach()

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Acceptance of each level, and the codes per pass that a chain of drafts would have with them."""
        found = []
        for batch in self.validation_batches():
            with hardware.autocast(self.device):
                found.append(self.loss(self.average, batch)["levels"])
        levels = torch.stack(found).mean(0)
        chain = 1 + levels.cumprod(0).sum().item()
        named = {f"accept{i}": x for i, x in enumerate(levels.tolist())}
        return {"refused": 1 - levels.mean().item(), "chain": chain, **named}

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
    found = gather(model, options, data, self_sampling, known, follow, crops, limit)
    settings = replace(settings, cfg=found.cfg)
    return run(
        ParallelTask(settings, layers, found.target, found.codes, found.origin, options.device), options
    )
