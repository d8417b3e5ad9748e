"""Training of a parallel drafter: every level of a draft at once, on guided features, from many anchors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lanternpp.devices import half_width
from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
from lanternpp.engine.guidance import Guidance
from lanternpp.errors import InputError
from lanternpp.targets.base import Target
from lanternpp.training import hardware
from lanternpp.training.codes import Codes, Variants, read_codes, tokenizer_of
from lanternpp.training.data import Order
from lanternpp.training.drafter import target_of
from lanternpp.training.features import Captions, lessons
from lanternpp.training.losses import acceptance
from lanternpp.training.run import Plan, Task, averaged, run
from lanternpp.training.target import spread


@dataclass(frozen=True)
class ParallelSettings:
    """What decides the result, budget and machine aside.

    The loss of a level is cross-entropy to the target's guided distribution (`guided`), -log of the acceptance
    (`lk`), or the sum of both (`both`); level l counts `fade` ** l.
    """

    loss: Literal["guided", "lk", "both"] = "both"
    cfg: float = 3.0
    batch_size: int = 16
    lr: float = 2e-3
    levels: int = 8  # of a draft
    anchors: int = 24  # places of a picture to draft from, in a step
    fade: float = 0.85
    noise: float = 0.1  # features are off by up to half of this
    turn: int = 256
    seed: int = 0
    decay: float = 0.995
    warmup: int = 50

    def __post_init__(self) -> None:
        if self.loss not in ("guided", "lk", "both"):
            raise InputError(f"loss {self.loss!r} is unknown: choose guided, lk, both.")


@dataclass(frozen=True)
class Lessons:
    """What some pictures teach: S slots, of which the first T are the prompt's."""

    ahead: Tensor  # [B, S - 1, D] inputs one ahead
    features: Tensor  # [B, S, D] guided, float32
    first: int  # T
    start: Tensor | None  # [B] where prompts begin; None: all at slot 0


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
        self.options, self.codes, self.device = settings, codes, device
        self.guidance = Guidance(settings.cfg)
        self.data, self.decay, self.warmup = codes.data, settings.decay, settings.warmup
        self.target = target.to(device).eval().requires_grad_(False)
        shape = target.decoder.config
        self.config = ParallelConfig(
            shape.dim, shape.heads, shape.hidden, layers, queries=settings.levels - 1, turn=settings.turn
        )
        self.settings = {
            **asdict(self.config),
            **asdict(settings),
            "data": codes.data["codes"],
            "target": origin,
        }
        self.model = ParallelDrafter(self.config, target.decoder.turns).float().to(device).train()
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
        self.order = Variants(
            Order(len(codes.train), settings.batch_size, settings.seed), codes.train.codes.shape[1]
        )
        self.train, self.val = Captions(target, codes.train), Captions(target, codes.val)

    def lessons(self, captions: Captions, index: Tensor, codes: Tensor) -> Lessons:
        """What pictures index [B] of codes [B, length] teach."""
        prompts, start = captions(index, self.guidance.branches)
        with torch.no_grad():
            ahead, features = lessons(self.target, prompts, self.guidance.rows(codes), start)
        count = len(codes)
        begin = None if start is None else start[:count]
        return Lessons(ahead[:count], self.guidance.merge(features), prompts.shape[1], begin)

    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        """One update."""
        index, variant, generator = self.order(step)
        codes = self.codes.train.pick(index, variant).to(self.device)
        with hardware.autocast(self.device):
            read = self.lessons(self.train, index, codes)
            places = read.features.shape[1] - read.first - self.options.levels
            anchors = torch.randperm(places, generator=generator)[: self.options.anchors].sort()[0]
            figures = self.loss(read, (read.first - 1 + anchors).to(self.device))
        optimizer = self.optimizers["model"]
        optimizer.zero_grad()
        figures["loss"].backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        optimizer.step()
        return figures

    def loss(self, read: Lessons, anchors: Tensor) -> dict[str, Tensor]:
        """What a step minimises, and the acceptance of the first level and of those after it; anchors [A] are slots."""
        first, dtype = read.first, read.ahead.dtype
        noise = (torch.rand_like(read.features) - 0.5) * self.options.noise
        with torch.no_grad():
            p = (
                self.target.head(read.features[:, first:].to(dtype)).float().softmax(-1)
            )  # of slots first..S - 1
        one, more = self.guess(self.model, replace(read, features=read.features + noise), anchors)
        level = torch.arange(1, self.options.levels, device=anchors.device)
        wanted = anchors[:, None] + 1 + level - first  # [A, levels - 1]
        cost, chance = self.cost(self.target.head(one[:, first - 1 :]), p)
        costs, chances = self.cost(self.target.head(more), p[:, wanted])
        fade = self.options.fade**level
        loss = (cost.mean() + (costs.mean((0, 1)) * fade).sum()) / (1 + fade.sum())
        return {"loss": loss, "accept": chance.mean(), "accept_more": chances.mean()}

    def guess(self, drafter: ParallelDrafter, read: Lessons, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Features of the first level [B, S - 1, D] and, beyond the anchors, of the others [B, A, levels - 1, D]."""
        levels, ahead = self.options.levels - 1, read.ahead
        one, more = drafter.teach(ahead, read.features[:, :-1].to(ahead.dtype), anchors, levels, read.start)
        level = torch.arange(1, self.options.levels, device=anchors.device)
        return one, drafter.after(more, ahead[:, anchors[:, None] + level])

    def cost(self, logits: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """logits and p [..., V] -> the loss and the acceptance at each place, [...]."""
        log_q = logits.float().log_softmax(-1)
        chance = torch.minimum(log_q.exp(), p).sum(-1)
        loss = torch.zeros_like(chance)
        if self.options.loss != "lk":
            loss = loss - (p * log_q).sum(-1)
        if self.options.loss != "guided":
            loss = loss - chance.log()
        return loss, chance.detach()

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Chance that a draft of each level is kept, and the codes per pass of a chain that follow from it."""
        index = spread(len(self.codes.val), 64)
        sums = torch.zeros(self.options.levels)
        for part in index.split(8):
            codes = self.codes.val.pick(part, torch.zeros_like(part)).to(self.device)
            with hardware.autocast(self.device):
                read = self.lessons(self.val, part, codes)
                last = read.features.shape[1] - self.options.levels
                anchors = torch.arange(read.first + 1, last, 13, device=self.device)
                one, more = self.guess(self.average, read, anchors)
                guesses = torch.cat((one[:, anchors, None], more), 2)
                level = torch.arange(self.options.levels, device=self.device)
                wanted = read.features[:, anchors[:, None] + 1 + level]
                p = self.target.head(wanted.to(read.ahead.dtype))
                chance = acceptance(self.target.head(guesses), p)
            sums += chance.mean((0, 1)).cpu() * len(part) / len(index)
        chain = 1 + sums.cumprod(0).sum().item()
        return {
            "refused": 1 - sums.mean().item(),
            "chain": chain,
            **{f"accept{i}": x for i, x in enumerate(sums.tolist())},
        }

    @torch.no_grad()
    def sample(self, path: Path) -> None:
        """Nothing to see."""

    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The averaged drafter."""
        return {"kind": "parallel", **asdict(self.config)}, self.average.state_dict()


def train(
    data: Path,
    model: Path,
    layers: int,
    settings: ParallelSettings,
    plan: Plan,
    crops: int = 2,
    limit: int | None = None,
) -> bool:
    """Train `model/parallel` on the codes of `data`; False if interrupted."""
    if layers < 1:
        raise InputError(f"layers {layers} must be at least 1.")
    tokenizer_of(model)
    target, origin = target_of(model, torch.bfloat16 if half_width(plan.device) else torch.float32)
    codes = read_codes(data, model, crops, plan.device, limit)
    return run(ParallelTask(settings, layers, target, codes, origin, plan.device), plan)
