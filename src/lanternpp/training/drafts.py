"""Drafts of a parallel drafter's training, and how many of their codes block verification keeps.

There is an estimate to train by, and a measurement to validate by.
With x_1 .. x_g drawn from the drafter's q, block verification (`engine/block.py`) decides 1 + sum E[w_i] codes, where
w_i = exp(s_i - max_{j <= i} s_j) and s_i is the sum of the log ratios log p_j(x_j) / q_j(x_j) up to level i, s_0 = 0.
The same expectation is one over chains that the target drew, as p = q exp(s):

    E_q[w_i] = E_p[exp(-max_{j <= i} s_j)]

A recorded picture is such a chain behind each of its codes. So the codes of a draft can be estimated without drawing one; of
the last code of each chain all values are summed over, not only the recorded one. Where pictures are not the target's own, this
still grows to its greatest value, g + 1, as q goes to p.

What is learned of it is each guess's own chance of being kept, which such a sum is, times the codes that depend on it
(`chain_gain`). The ratios at the recorded codes themselves are taken as they are: a drafter that may raise q there learns the
recorded codes by heart, and drafts no better.

The same chains train the drafter to predict what is kept. A guess is kept, given that those before it are, with probability
w_i / w_{i-1}, whose mean over the guess is sum_y min(p_i(y), q_i(y) / w_{i-1}); a chain comes so far in a draft, and is kept so
far, as often as the target draws it, times exp(-max_{j < i} s_j).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.drafters.base import QueryDrafter
from lanternpp.drafters.parallel import branches
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling, draw
from lanternpp.engine.verify.joint import chain_weights
from lanternpp.models.base import Target
from lanternpp.training.features import slot_inputs

FURTHEST = 60.0  # exp of more is not computed, as it may be infinite
SMALLEST = 1e-6  # chance whose logarithm is taken


def keep_chances(p: Tensor, log_q: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Along chains that the target drew: how often drafts come there, relative to it, and keep the next guess then, [..., g].

    The product estimates the mean w_1 .. w_g of drafts. Only the second is differentiable, in log_q of its own level. p and
    log_q [..., g, V] behind every code of the chain; codes [..., g], drawn from p.
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
    """The loss of `ParallelSettings` and the acceptance at each place, [...], of p and log_q [..., V]."""
    chance = torch.minimum(log_q.exp(), p).sum(-1)
    cost = torch.zeros_like(chance)
    if loss != "lk":
        cost = cost - (p * log_q).sum(-1)
    if loss in ("lk", "both"):
        cost = cost - chance.log()
    return cost, chance.detach()


def confidence_loss(drafter: QueryDrafter, features: Tensor, reach: Tensor, chance: Tensor) -> Tensor:
    """Cross-entropy to `keep_chances` of what is predicted from conditioned features [..., D], weighted by how often drafts come there.

    It moves the layer that predicts alone.
    """
    assert drafter.confidence is not None
    logits = drafter.confidence(features.detach())[..., 0].float()
    cost = F.binary_cross_entropy_with_logits(logits, chance.detach().clamp(0, 1).float(), reduction="none")
    return (cost * reach.detach()).sum() / reach.detach().sum().clamp(min=1e-6)


class DraftFigures:
    """What is kept of measured drafts, and what the drafter predicted of it.

    codes: those that block verification decides per draft, 1 + sum E[w_i]; predicted: what the drafter expected of that;
    refused: the guesses of a draft that are not kept; kept and expected: E[w_i] by level, and the prediction of it; calibration:
    codes predicted and measured of each quarter of the drafts, those of least expectation first.
    """

    def __init__(self) -> None:
        self._weights, self._drafts, self._counted = list[Tensor](), list[Tensor](), list[Tensor]()

    def add(self, weights: Tensor, survival: Tensor, in_picture: Tensor) -> None:
        """Drafts as `DraftMeasure.weights` gives them, and 1.0 at levels in the picture, all [B, A, L]."""
        both = torch.stack((weights, survival)) * in_picture
        self._weights.append(both.sum((1, 2)))
        self._drafts.append(1 + both.sum(-1).flatten(1))
        self._counted.append(in_picture.sum((0, 1)))

    def result(self) -> dict[str, Any]:
        """The figures of all of them."""
        kept, expected = torch.stack(self._weights).sum(0) / torch.stack(self._counted).sum(0).clamp(min=1)
        codes = 1 + kept.sum().item()
        figures = {"codes": codes, "predicted": 1 + expected.sum().item(), "refused": 1 + len(kept) - codes}
        drafts = torch.cat(self._drafts, 1)  # [2, n]
        parts = drafts[:, drafts[1].argsort()].flip(0).chunk(4, 1)
        lists = {"kept": rounded(kept), "expected": rounded(expected)}
        return {**figures, **lists, "calibration": [rounded(part.mean(1)) for part in parts]}


def rounded(values: Tensor) -> list[float]:
    """To four digits."""
    return [round(value, 4) for value in values.tolist()]


@dataclass(frozen=True)
class DraftBatch:
    """Inputs of B pictures: S slots, the first T of them the prompt's. Drafts of `levels` codes begin behind A slots, the anchors."""

    prompts: Tensor  # [R, T, D] the conditional ones first; those of B rows where no pass of the target will be needed
    start: Tensor | None  # [R] where prompts begin; None: all at slot 0
    codes: Tensor  # [B, S - T + 1]
    next_inputs: Tensor  # [B, S - 1, D] the input after each slot
    features: Tensor  # [B, S, (1 + aux) D] guided, float32
    anchors: Tensor  # [B, A] slots
    hints: Tensor | None = None  # [B, S - 1 + A * (levels - 1), D]

    def level_slots(self, levels: int) -> tuple[Tensor, Tensor]:
        """[B, A, levels]: the slots that decide the codes of drafts, and 1.0 where they are in the picture, else 0.0."""
        level = torch.arange(levels, device=self.anchors.device)
        slots, last = self.anchors[..., None] + 1 + level, self.features.shape[1] - 1
        return slots.clamp(max=last), (slots <= last).float()

    @property
    def drafter_start(self) -> Tensor | None:
        """Where the drafter's rows begin, [B]: as the conditional prompts."""
        return None if self.start is None else self.start[: len(self.codes)]


def gather_slots(x: Tensor, slot: Tensor) -> Tensor:
    """x [B, S, D] at slots [B, A, L] -> [B, A, L, D]; slots beyond the last are the last."""
    slot = slot.clamp(max=x.shape[1] - 1)
    return x.gather(1, slot.flatten(1)[..., None].expand(-1, -1, x.shape[-1])).unflatten(1, slot.shape[1:])


class DraftMeasure:
    """Drafts of a drafter behind some slots of pictures, drawn and compared with the target's distributions there."""

    def __init__(self, target: Target, guidance: Guidance, sampling: Sampling):
        self.target, self.guidance, self.sampling = target, guidance, sampling

    def weights(
        self, drafter: QueryDrafter, levels: Tensor, batch: DraftBatch, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """w_1 .. w_L of a draft behind each anchor, drawn with `generator`, and what the drafter predicted of them, [B, A, L].

        levels [B, A, L, D]: the drafter's features of all levels, not conditioned on a code yet.
        """
        slots, _ = batch.level_slots(levels.shape[2])
        place = slots + 1 - batch.prompts.shape[1]  # [B, A, L] of each guess, among the picture's codes
        codes, chance = self._draw(drafter, levels, place, generator)
        before = self.target.embed(codes[:, :, :-1]).to(levels.dtype)
        further = drafter.condition_on(levels[:, :, 1:], before)
        assert drafter.confidence is not None
        sure = drafter.confidence(torch.cat((levels[:, :, :1], further), 2))[..., 0]
        features = self._features(codes, batch)
        found = []
        for level in range(levels.shape[2]):
            p = self._probs(self.guidance.merge(self.target.head(features[:, :, level])), place[:, :, level])
            found.append(p.gather(-1, codes[:, :, level, None])[..., 0])
        ratio = torch.stack(found, -1) / chance
        weights = chain_weights(ratio.flatten(0, 1))[:, 1:].view_as(ratio)
        return weights, sure.to(weights.dtype).sigmoid().cumprod(-1)

    def _draw(
        self, drafter: QueryDrafter, levels: Tensor, place: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Drafts, as `proposers.parallel` draws them: codes [B, A, L] and the probability of each, [B, A, L]."""
        u = torch.rand(place.shape, dtype=torch.float64, generator=generator).to(place.device)
        codes: list[Tensor] = []
        chances: list[Tensor] = []
        for level in range(levels.shape[2]):
            here = levels[:, :, level]
            if codes:
                here = drafter.condition_on(here, self.target.embed(codes[-1]).to(here.dtype))
            logits = self.target.head(here)
            q = self._probs(logits if logits.element_size() == 8 else logits.float(), place[:, :, level])
            codes.append(draw(q, u[:, :, level, None])[..., 0])
            chances.append(q.gather(-1, codes[-1][..., None])[..., 0])
        return torch.stack(codes, -1), torch.stack(chances, -1)

    def _features(self, codes: Tensor, batch: DraftBatch) -> Tensor:
        """The target's features where it decides every code of the drafts [B, A, L], [R, A, L, D]."""
        rows, roots = self.guidance.rows, self.guidance.rows(batch.anchors + 1)
        inputs = slot_inputs(self.target, batch.prompts, rows(batch.codes))
        drafted = rows(self.target.embed(codes[..., :-1].flatten(1)).to(inputs.dtype))
        slots, levels = inputs.shape[1], codes.shape[2] - 1
        nodes = branches(slots, roots, levels, batch.start)
        out = self.target.decoder.forward_sequence(torch.cat((inputs, drafted), 1), *nodes)
        behind = out[:, slots:].unflatten(1, (roots.shape[1], levels))
        return torch.cat((gather_slots(out, roots[..., None]), behind), 2)

    def _probs(self, logits: Tensor, place: Tensor) -> Tensor:
        """Logits [B, A, V] at places [B, A] of the picture -> what codes are drawn from."""
        return self.sampling.probs(self.target.constrain(logits, place))
