"""From features to codes: the head and guidance, then temperature, top-k and top-p, or the greedy choice.

Here alone samples B become rows R and back, and here alone stochastic and greedy decoding differ.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.engine.noise import Noise
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn.backend import Backend
from lanternpp.types import Warping

# of temperatures; MOST also of guidance scales: outside this range logits may overflow float32
LEAST, MOST = 1e-6, 1e6


@dataclass(frozen=True)
class Guidance:
    """Scale 1 is the conditional model alone, in one row per sample; above it every sample has two."""

    scale: float = 1.0
    name: InitVar[str] = field(default="cfg", kw_only=True)  # in messages

    def __post_init__(self, name: str) -> None:
        if not 1 <= self.scale <= MOST:
            raise InputError(f"{name} {self.scale} is out of range; use 1 (no guidance) to {MOST:g}")

    @property
    def branches(self) -> int:
        """Rows per sample."""
        return 1 if self.scale == 1 else 2

    def rows(self, x: Tensor) -> Tensor:
        """[B, ...] -> [R, ...]; conditional rows first."""
        return x if self.branches == 1 else torch.cat((x, x))

    def logits(self, model: Target, features: Tensor) -> Tensor:
        """Features [R, N, D] -> the guided logits of a model's head, [B, N, V]."""
        native = model.native_head
        found = None if native is None else native(features, self.scale, self.branches)
        return self.merge(model.head(features)) if found is None else found

    def merge(self, logits: Tensor) -> Tensor:
        """[R, ..., V] -> [B, ..., V] in float32 (float64 stays), before temperature."""
        logits = logits if logits.element_size() == 8 else logits.float()
        if self.branches == 1:
            return logits
        conditional, unconditional = logits.chunk(2)
        return unconditional.lerp(conditional, self.scale)


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 keep every code. Raises InputError out of range."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    backend: Backend | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.temperature and not LEAST <= self.temperature <= MOST:
            raise InputError(
                f"temperature {self.temperature} is out of range; use 0 (greedy), or {LEAST:g} to {MOST:g}"
            )
        if self.top_k < 0:
            raise InputError(f"top-k {self.top_k} is negative; use 0 (all codes) or more")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top-p {self.top_p} is outside (0, 1]; use 1 to keep every code")

    @property
    def greedy(self) -> bool:
        """Whether the most probable code is always taken."""
        return self.temperature == 0

    @property
    def warp(self) -> Warping:
        """Temperature, top-k and top-p."""
        return self.temperature, self.top_k, self.top_p

    def probs(self, logits: Tensor) -> Tensor:
        """logits [..., V] -> the distribution that codes are drawn from, [..., V]. Greedy: the softmax without temperature."""
        if self.backend is not None and (found := self.backend.probs(logits, self.warp)) is not None:
            return found
        if self.greedy:
            return logits.softmax(-1)
        if self.temperature != 1:
            logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            # all codes as probable as the last of the best, as transformers has it
            least = logits.topk(self.top_k, -1).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        probs = logits.softmax(-1)
        if self.top_p < 1:
            ordered, index = probs.sort(dim=-1, descending=True, stable=True)
            ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0)
            probs = torch.zeros_like(probs).scatter_(-1, index, ordered / ordered.sum(-1, keepdim=True))
        return probs

    def children(self, q: Tensor, count: int, noise: Noise, purpose: int) -> Tensor:
        """q [B, W, V] -> `count` codes per row in trial order, [B, W, count].

        Stochastic: sampling without replacement, as the distinct codes of four times as many independent draws, in
        order. A row with too few distinct codes ends in repetitions, which verification skips. Greedy: `likeliest`.
        """
        if self.greedy:
            return self.likeliest(q, count)
        u = noise.fine(purpose, q.shape[1], draws_of(count))
        if self.backend is not None and (found := self.backend.children(q, u, count)) is not None:
            return found
        codes = draw(q, u)
        if count == 1:
            return codes
        same = (codes[..., :, None] == codes[..., None, :]).tril(-1).any(-1)
        return codes.gather(-1, same.byte().argsort(dim=-1, stable=True)[..., :count])

    def likeliest(self, q: Tensor, count: int) -> Tensor:
        """q [..., V] -> the `count` most probable codes, [..., count]; where there are fewer they are repeated."""
        if self.backend is not None and (found := self.backend.children(q, None, count)) is not None:
            return found
        best = q.topk(min(count, q.shape[-1]), -1).indices
        return (
            best if best.shape[-1] == count else best[..., torch.arange(count, device=q.device) % q.shape[-1]]
        )

    def accepts(self, relaxed: Tensor, chance: Tensor, code: Tensor, u: Tensor) -> Tensor:
        """Whether a child is kept, [B]: u q(x) < relaxed(x), or the relaxed argmax is x when greedy.

        relaxed [B, V], chance [B] = q(x), code [B], u [B] uniform.
        """
        if self.greedy:
            return relaxed.argmax(-1) == code
        return u * chance < relaxed.gather(-1, code[:, None])[:, 0]

    def residual(self, rule: Acceptance, p: Tensor, relaxed: Tensor, q: Tensor, code: Tensor) -> Tensor:
        """The distribution that the next child is verified against once one is rejected, [B, V]; greedy: still p."""
        return p if self.greedy else rule.residual(p, relaxed, q, code)

    def draw(self, probs: Tensor, noise: Noise) -> Tensor:
        """probs [B, V], not necessarily normalised -> a code per sample, [B]."""
        if self.greedy:
            return probs.argmax(-1)
        return draw(probs, noise.fine(Noise.BONUS, 1))[:, 0]


def draws_of(count: int) -> int:
    """Independent draws among which `count` different codes are looked for."""
    return 1 if count == 1 else max(4 * count, 16)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF sampling: probs [..., V], not necessarily normalised, at uniform u [..., M] -> codes [..., M]."""
    total = probs.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(total, u * total[..., -1:], right=True).clamp_(max=probs.shape[-1] - 1)
