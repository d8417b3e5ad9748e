"""Training of an EAGLE drafter (arXiv 2401.15077): the target's next feature, and with it its next code."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.drafters.base import mark
from lanternpp.drafters.eagle import EagleDrafter
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.proposer import Parts
from lanternpp.engine.sampling import Sampling
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.proposers.tree import TreeProposer
from lanternpp.training import hardware
from lanternpp.training.acceptance import measure_acceptance
from lanternpp.training.data import BatchSampler, evenly_spaced
from lanternpp.training.features import CaptionPrompts, causal_mask, drafter_inputs
from lanternpp.training.laws import LOSSES, laws_of
from lanternpp.training.material.cached import FeatureCache, cached_features
from lanternpp.training.material.codes import Codes, VariantSampler
from lanternpp.training.material.gather import gather
from lanternpp.training.material.samples import SelfSampling
from lanternpp.training.pictures import sheet
from lanternpp.training.run import Task, TrainingOptions, averaged, run
from lanternpp.training.task import check_rates
from lanternpp.training.team import team
from lanternpp.trees import build_tree

CHECK_PICTURES = 96  # validation pictures measured at a check; at the end all are
SAMPLE_PICTURES = 4  # pictures drawn at a check


@dataclass(frozen=True)
class DrafterSettings:
    """Hyperparameters: all that decides the result, except the budget and the machine.

    The loss is SmoothL1 on features + `weight` x a loss on distributions: `paper`, cross-entropy to the
    target's; `guided`, the same after guidance, which is what verification sees; `lk`, -log of the
    acceptance itself, after guidance; `both`, the sum of these two.
    """

    loss: Literal["paper", "guided", "lk", "both"] = "guided"
    weight: float = 0.1
    cfg: float = 3.0
    batch_size: int = 16
    lr: float = 1e-3
    noise: float = 0.2  # width of the uniform noise that is added to features
    drop_captions: float = (
        0.1  # replaced by the null prompt; for the paper's loss alone, as the others always read both prompts
    )
    rounds: int = 1  # passes per step; each after the first reads features that the drafter predicted (HASS, arXiv 2408.15766)
    inherit: bool = False  # start from the weights of the target's last block; no better in short runs
    seed: int = 0
    decay: float = 0.995
    warmup: int = 100

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise InputError(f"loss {self.loss!r} is unknown: choose {', '.join(LOSSES)}.")
        if self.batch_size < 1:
            raise InputError(f"batch size {self.batch_size} must be at least 1.")
        check_rates(lr=self.lr)
        if self.weight < 0 or self.noise < 0:
            raise InputError(f"weight {self.weight} and noise {self.noise} must be at least 0.")
        if self.rounds < 1:
            raise InputError(f"rounds {self.rounds} must be at least 1.")
        if not 0 <= self.drop_captions < 1:
            raise InputError(f"captions dropped {self.drop_captions} is a share: 0 or more, and below 1.")

    @property
    def guidance(self) -> Guidance:
        """The guidance under which the loss compares distributions."""
        return Guidance(1.0 if self.loss == "paper" else self.cfg)


class DrafterTask(Task):
    """An EAGLE drafter for a frozen target. The target's features are computed from codes in every step, or read from a cache."""

    name = "drafter"
    keep = "lk"
    model: EagleDrafter
    average: EagleDrafter

    def __init__(
        self,
        settings: DrafterSettings,
        layers: int,
        target: Target,
        codes: Codes,
        origin: str,
        device: torch.device,
        sampling: Sampling | None = None,
        cache: Path | None = None,
    ):
        self.sampling = sampling or Sampling()
        torch.manual_seed(settings.seed)
        self.hparams, self.codes, self.device = settings, codes, device
        self.laws = laws_of(target, settings.loss)
        self.guidance = self.laws.guidance(settings.guidance.scale)
        self.data, self.decay, self.warmup = codes.data, settings.decay, settings.warmup
        self.target = target.to(device).eval().requires_grad_(False)
        drafter = self.begin(layers)
        self.settings = {
            **self.config.flat(),
            **asdict(settings),
            "data": codes.data["codes"],
            "target": origin,
        }
        self.model = drafter.float().to(device).train()
        self.average = averaged(self.model)  # type: ignore[assignment]
        self.optimizers = {
            "model": torch.optim.AdamW(
                self.model.parameters(), settings.lr, (0.9, 0.95), weight_decay=0.0, fused=True
            )
        }
        self.sampler = VariantSampler(
            BatchSampler(len(codes.train), settings.batch_size, settings.seed), codes.train.codes.shape[1]
        )
        self.train, self.val = CaptionPrompts(target, codes.train), CaptionPrompts(target, codes.val)
        self.drawn: Tensor | None = None
        self.features: FeatureCache | None = None
        if cache is not None:
            self.features = cached_features(
                target, self.train, origin, codes.train, codes.data["codes"], cache
            )

    def begin(self, layers: int) -> EagleDrafter:
        """A drafter to train, and its config."""
        shape, kind = self.target.decoder.config, self.laws.drafter
        self.config = kind.config_class.like(shape, layers, **self.laws.fields)
        drafter = kind(self.config, self.target.decoder.rotary_table)
        if self.hparams.inherit:
            drafter.inherit(self.target)
        return drafter

    def speed_up(self) -> None:
        """Compile target, drafter and loss as one graph of one shape."""
        self.loss = torch.compile(self.loss, fullgraph=True, dynamic=False)  # type: ignore[method-assign]

    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        """One update."""
        index, variant, generator = self.sampler(step)
        drop = torch.rand(len(index), generator=generator) < self.hparams.drop_captions
        index, variant, drop = map(team().share, (index, variant, drop))
        codes = self.target.from_cache(self.codes.train.pick(index, variant).to(self.device))
        branches, dropped = (2, None) if self.guidance.branches == 2 else (1, drop)
        prompts, known = self.train(index, branches, dropped), None
        if self.features is not None:
            known = self.features(index, variant, branches, dropped).to(self.device)
        with hardware.autocast(self.device):
            feature, distribution = self.loss(*prompts, codes, known)
            loss = feature + self.hparams.weight * distribution
        optimizer = self.optimizers["model"]
        optimizer.zero_grad()
        loss.backward()
        team().average(self.model)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        optimizer.step()
        return {"loss": loss, "feature": feature, "distribution": distribution}

    def loss(
        self, prompts: Tensor, start: Tensor | None, codes: Tensor, known: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """prompts [R, T, D] from start [R] on, codes [B, length] -> loss on features, loss on distributions.

        known [R, S, D]: the target's features, if they are cached.
        """
        rows, merge = self.guidance.rows, self.guidance.merge
        with torch.no_grad():
            next_inputs, features = drafter_inputs(self.target, prompts, rows(codes), start, known)
            noise = (torch.rand_like(features, dtype=torch.float32) - 0.5) * self.hparams.noise
            true_features, points = features[:, prompts.shape[1] :], self.laws.points(codes[:, 1:])
            logits = merge(self.laws.head(self.target, self.target, true_features, points))
        mask, first = causal_mask(start, next_inputs.shape[1]), prompts.shape[1]
        inputs = (features + noise)[:, :-1].to(features.dtype)
        costs = []
        for skipped in range(self.hparams.rounds):
            every = self.model.forward_sequence(next_inputs, inputs, mask)
            predicted, true = every[:, first - 1 + skipped :], true_features[:, skipped:]
            guesses = self.laws.head(self.target, self.model, predicted, points[:, skipped:])
            distribution = self.laws.loss(merge(guesses), logits[:, skipped:])
            costs.append(torch.stack((F.smooth_l1_loss(predicted.float(), true.float()), distribution)))
            inputs = torch.cat((features[:, :first], every[:, first - 1 : -1].to(features.dtype)), 1)
        feature, distribution = torch.stack(costs).mean(0)
        return feature, distribution

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Losses and acceptance on some validation pictures; acceptance by depth and rank while four pictures are drawn."""
        figures = self.validate_on(evenly_spaced(len(self.codes.val), CHECK_PICTURES))
        return {**figures, **self.draw()}

    @torch.no_grad()
    def final(self) -> dict[str, Any]:
        """The figures on every validation picture."""
        figures = self.validate_on(torch.arange(len(self.codes.val)))
        return {**figures, "validation_pictures": len(self.codes.val)}

    def validate_on(self, index: Tensor) -> dict[str, float]:
        """Expected acceptance after guidance (first draft level, and second), agreement of the best code, losses."""
        guidance, laws = self.laws.guidance(self.hparams.cfg), self.laws
        sums: dict[str, float] = {}
        for part in index.split(8):
            found = self.codes.val.pick(part, torch.zeros_like(part)).to(self.device)
            codes = guidance.rows(self.target.from_cache(found, torch.Generator().manual_seed(0)))
            prompts, start = self.val(part, guidance.branches)
            first, count = prompts.shape[1], len(part)
            with hardware.autocast(self.device):
                next_inputs, features = drafter_inputs(self.target, prompts, codes, start)
                mask = causal_mask(start, next_inputs.shape[1])
                predicted = self.average.forward_sequence(next_inputs, features[:, :-1], mask)
                own_features = torch.cat((features[:, :first], predicted[:, first - 1 : -1]), 1)
                second_features = self.average.forward_sequence(next_inputs, own_features, mask)[:, first:]
                predicted, true_features = predicted[:, first - 1 :], features[:, first:]
                points, own = laws.points(codes[:count, 1:]), (self.target, self.average)
                target_logits = laws.head(self.target, self.target, true_features, points)
                logits = laws.head(*own, predicted, points)
                second = laws.head(*own, second_features, points[:, 1:])
            p, q, q2 = (guidance.merge(x) for x in (target_logits, logits, second))
            accepted = laws.acceptance(q, p)
            figures = {
                "accept": accepted.mean(),
                "accept2": laws.acceptance(q2, p[:, 1:]).mean(),
                "agree": laws.agreement(q, p),
                "feature": F.smooth_l1_loss(predicted.float(), true_features.float()),
                "paper": laws.soft_cross_entropy(logits[:count], target_logits[:count]),
                "guided": laws.soft_cross_entropy(q, p),
                "lk": -accepted.log().mean(),
            }
            for name, value in figures.items():
                sums[name] = sums.get(name, 0.0) + value.item() * count
        return {name: value / len(index) for name, value in sums.items()}

    def draw(self) -> dict[str, Any]:
        """Draw four pictures under the exact rule on a static tree; returns the acceptance. `sample` shows the pictures."""
        dtype = next(self.target.parameters()).dtype
        drafter = copy.deepcopy(self.average).to(dtype)
        proposer = TreeProposer.build(Parts(build_tree(self.laws.tree), drafter))
        guidance, prompts = Guidance(self.hparams.cfg), self.val.known_texts[:SAMPLE_PICTURES]
        found = measure_acceptance(self.target, proposer, self.sampling, guidance, prompts)
        self.drawn = found.codes
        return found.figures

    @torch.no_grad()
    def sample(self, path: Path) -> None:
        """The pictures last drawn."""
        if self.drawn is None:
            self.draw()
        assert self.drawn is not None
        sheet(self.target.pixels(self.drawn), len(self.drawn), path)

    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The averaged drafter."""
        return {
            "kind": self.laws.kind,
            **self.config.flat(),
            "target": mark(self.target),
        }, self.average.state_dict()


def train(
    data: Path | None,
    model: str | Path,
    layers: int,
    settings: DrafterSettings,
    options: TrainingOptions,
    crops: int = 2,
    limit: int | None = None,
    self_sampling: SelfSampling | None = None,
    follow: bool = False,
    cache: bool = False,
) -> bool:
    """Train the drafter of `model` in the folder of `options`; False if interrupted.

    On the codes of the pictures in `data` or, with `self_sampling`, of pictures that the target draws.
    follow: take the guidance scale from the model's defaults, not from `settings`. cache: keep the target's features
    on disk instead of computing them in every step.
    """
    if layers < 1:
        raise InputError(f"layers {layers} must be at least 1.")
    known = asdict(settings) | {"layers": layers}
    found = gather(model, options, data, self_sampling, known, follow, crops, limit, latents=True)
    if cache and found.target.channels:
        raise InputError(
            "--cache-features is of codes, and the latents of pictures are drawn anew in every step."
        )
    settings = replace(settings, cfg=found.cfg)
    store = found.teacher.store if cache else None
    task = DrafterTask(
        settings, layers, found.target, found.codes, found.origin, options.device, found.sampling, store
    )
    return run(task, options)
