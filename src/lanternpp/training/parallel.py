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
from lanternpp.training.data import Order, spread
from lanternpp.training.features import Captions, lessons
from lanternpp.training.material.codes import Codes, Variants
from lanternpp.training.material.gather import gather
from lanternpp.training.material.samples import Own
from lanternpp.training.run import Plan, Task, averaged, run
from lanternpp.training.team import team


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
    anchors: int = 32  # places of a picture to draft from, in a step
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
    """What some pictures teach: S slots, of which the first T are the prompt's, and drafts of `levels` behind A of them."""

    ahead: Tensor  # [B, S - 1, D] inputs one ahead
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
        self.options, self.codes, self.device = settings, codes, device
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
        self.order = Variants(
            Order(len(codes.train), settings.batch_size, settings.seed), codes.train.codes.shape[1]
        )
        self.train, self.val = Captions(target, codes.train), Captions(target, codes.val)

    def lessons(self, captions: Captions, index: Tensor, codes: Tensor, pick: Tensor) -> Lessons:
        """What pictures index [B] of codes [B, length] teach, drafted behind the places pick [A] of their codes."""
        prompts, start = captions(index, self.guidance.branches)
        with torch.no_grad():
            ahead, features = lessons(self.target, prompts, self.guidance.rows(codes), start)
        count, first = len(codes), prompts.shape[1]
        begin = None if start is None else start[:count]
        anchors = (first - 1 + pick).to(self.device).expand(count, -1)
        return Lessons(ahead[:count], self.guidance.merge(features), first, begin, anchors)

    def read(self, step: int) -> Lessons:
        """What a step learns from."""
        index, variant, generator = self.order(step)
        index, variant = team().share(index), team().share(variant)
        codes = self.codes.train.pick(index, variant).to(self.device)
        places = codes.shape[1] - self.options.levels
        pick = torch.randperm(places, generator=generator)[: self.options.anchors].sort()[0]
        return self.lessons(self.train, index, codes, pick)

    def examine(self) -> Iterator[Lessons]:
        """What is validated on."""
        for part in spread(len(self.codes.val), 64).split(8):
            codes = self.codes.val.pick(part, torch.zeros_like(part)).to(self.device)
            pick = torch.arange(2, codes.shape[1] - self.options.levels, 13)
            yield self.lessons(self.val, part, codes, pick)

    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        """One update."""
        with hardware.autocast(self.device):
            read = self.read(step)
            noise = (torch.rand_like(read.features) - 0.5) * self.options.noise
            figures = self.loss(self.model, read, noise)
        optimizer = self.optimizers["model"]
        optimizer.zero_grad()
        figures["loss"].backward()
        team().average(self.model)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        optimizer.step()
        return {name: value for name, value in figures.items() if value.dim() == 0}

    def loss(self, drafter: ParallelDrafter, read: Lessons, noise: Tensor | None = None) -> dict[str, Tensor]:
        """What a step minimises, the acceptance at all levels, and that of each level [levels]."""
        slots, width = read.features.shape[1:]
        level = torch.arange(self.options.levels, device=read.anchors.device)
        wanted = read.anchors[..., None] + 1 + level  # [B, A, levels] slots
        there = (wanted < slots).float()
        place = wanted.clamp(max=slots - 1).flatten(1)[..., None].expand(-1, -1, width)
        dtype = read.ahead.dtype
        with torch.no_grad():
            p = self.target.head(read.features.gather(1, place).to(dtype)).float().softmax(-1)
        cost, chance = self.cost(self.target.head(self.guess(drafter, read, noise).flatten(1, 2)), p)
        cost, chance = (x.view_as(there) * there for x in (cost, chance))
        counted = there.sum((0, 1)).clamp(min=1)
        fade = self.options.fade**level
        loss = (cost.sum((0, 1)) / counted * fade).sum() / fade.sum()
        levels = chance.sum((0, 1)) / counted
        return {"loss": loss, "accept": levels.mean(), "levels": levels}

    def guess(self, drafter: ParallelDrafter, read: Lessons, noise: Tensor | None = None) -> Tensor:
        """Features of every level behind the anchors, [B, A, levels, D]."""
        levels, ahead = self.options.levels - 1, read.ahead
        given = read.features if noise is None else read.features + noise
        given = given[:, :-1].to(ahead.dtype)
        one, more = drafter.forward_sequence(ahead, given, read.anchors, levels, read.start, read.hints)

        def at(x: Tensor, slot: Tensor) -> Tensor:
            slot = slot.clamp(max=x.shape[1] - 1)
            return x.gather(1, slot.flatten(1)[..., None].expand(-1, -1, x.shape[-1])).unflatten(
                1, slot.shape[1:]
            )

        level = torch.arange(1, self.options.levels, device=ahead.device)
        before = at(ahead, read.anchors[..., None] + level)
        return torch.cat((at(one, read.anchors[..., None]), drafter.condition_on(more, before)), 2)

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
        found = []
        for read in self.examine():
            with hardware.autocast(self.device):
                found.append(self.loss(self.average, read)["levels"])
        levels = torch.stack(found).mean(0)
        chain = 1 + levels.cumprod(0).sum().item()
        named = {f"accept{i}": x for i, x in enumerate(levels.tolist())}
        return {"refused": 1 - levels.mean().item(), "chain": chain, **named}

    @torch.no_grad()
    def sample(self, path: Path) -> None:
        """Nothing to see."""

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
    plan: Plan,
    crops: int = 2,
    limit: int | None = None,
    own: Own | None = None,
    follow: bool = False,
) -> bool:
    """Train a parallel drafter of `model` in the plan's folder; False if interrupted. See `drafter.train`."""
    if layers < 1:
        raise InputError(f"layers {layers} must be at least 1.")
    known = asdict(settings) | {"layers": layers}
    found = gather(model, plan, data, own, known, follow, crops, limit)
    settings = replace(settings, cfg=found.cfg)
    return run(ParallelTask(settings, layers, found.target, found.codes, found.origin, plan.device), plan)
