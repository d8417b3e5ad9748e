"""From features to codes: the head and guidance, then temperature, top-k and top-p, or the greedy choice.

Here alone samples B become rows R and back, and here alone stochastic and greedy decoding differ.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from lanternpp.engine.noise import Noise
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn.backend import PYTORCH, Backend
from lanternpp.types import Warping

# Outside these limits logits may overflow float32.
MIN_TEMPERATURE, MAX_TEMPERATURE, MAX_SCALE = 1e-6, 1e6, 1e6


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: with scale 1 a sample has a conditional row alone, above 1 an unconditional row too."""

    scale: float = 1.0
    name: InitVar[str] = field(default="cfg", kw_only=True)  # in messages

    def __post_init__(self, name: str) -> None:
        if not 1 <= self.scale <= MAX_SCALE:
            raise InputError(f"{name} {self.scale} is out of range; use 1 (no guidance) to {MAX_SCALE:g}")

    @property
    def branches(self) -> int:
        """Rows per sample."""
        return 1 if self.scale == 1 else 2

    def rows(self, x: Tensor) -> Tensor:
        """Repeat x [B, ...] for every branch: [R, ...], conditional rows first."""
        return x if self.branches == 1 else torch.cat((x, x))

    def logits(self, model: Target, features: Tensor) -> Tensor:
        """Return the guided logits [B, N, V] of a model's head for features [R, N, D]."""
        native = model.native_head
        logits = None if native is None else native(features, self.scale, self.branches)
        return self.merge(model.head(features)) if logits is None else logits

    def merge(self, logits: Tensor) -> Tensor:
        """Guide logits [R, ..., V]: [B, ..., V] in float32 (float64 stays), before temperature."""
        logits = logits if logits.element_size() == 8 else logits.float()
        if self.branches == 1:
            return logits
        conditional, unconditional = logits.chunk(2)
        return unconditional.lerp(conditional, self.scale)


@dataclass(frozen=True)
class Sampling:
    """How codes are drawn: temperature 0 is greedy; top_k 0 and top_p 1 keep every code. Raises InputError out of range."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    backend: Backend | None = field(default=None, compare=False, repr=False, kw_only=True)  # None: PyTorch

    def __post_init__(self) -> None:
        if self.temperature and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            limits = f"{MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
            raise InputError(f"temperature {self.temperature} is out of range; use 0 (greedy), or {limits}")
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
        """Return the distribution that codes are drawn from, [..., V], for logits [..., V]. Greedy: the plain softmax."""
        probs = (self.backend or PYTORCH).probs(logits, self.warp)
        if probs is not None:
            return probs
        if self.greedy:
            return logits.softmax(-1)
        if self.temperature != 1:
            logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            # Ties with the k-th code are kept, as in transformers.
            threshold = logits.topk(self.top_k, -1, sorted=False).values.amin(-1, keepdim=True)
            logits = logits.masked_fill(logits < threshold, float("-inf"))
        probs = logits.softmax(-1)
        if self.top_p < 1:
            ordered, index = probs.sort(dim=-1, descending=True, stable=True)
            ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0)
            probs = torch.zeros_like(probs).scatter_(-1, index, ordered / ordered.sum(-1, keepdim=True))
        return probs

    def children(self, q: Tensor, count: int, noise: Noise, purpose: int) -> Tensor:
        """Draw `count` codes from each q [B, W, V], in trial order: [B, W, count].

        Stochastic: sampling without replacement, as the first distinct codes of `draws_of(count)` independent draws. A row
        with too few distinct codes ends in repetitions, which verification skips. Greedy: `likeliest`.
        """
        if self.greedy:
            return self.likeliest(q, count)
        u = noise.fine(purpose, q.shape[1], draws_of(count))
        children = (self.backend or PYTORCH).children(q, u, count)
        if children is not None:
            return children
        codes = draw(q, u)  # [B, W, draws]
        if count == 1:
            return codes
        repeated = (codes[..., :, None] == codes[..., None, :]).tril(-1).any(-1)
        return codes.gather(-1, repeated.byte().argsort(dim=-1, stable=True)[..., :count])

    def likeliest(self, q: Tensor, count: int) -> Tensor:
        """Return the `count` most probable codes of q [..., V], [..., count]; repeated where V is less than `count`."""
        children = (self.backend or PYTORCH).children(q, None, count)
        if children is not None:
            return children
        codes = q.topk(min(count, q.shape[-1]), -1).indices
        if codes.shape[-1] < count:
            codes = codes[..., torch.arange(count, device=q.device) % q.shape[-1]]
        return codes

    def accepts(self, relaxed: Tensor, q_code: Tensor, code: Tensor, u: Tensor) -> Tensor:
        """Return whether a child x is kept, [B]: u q(x) < relaxed(x), or x is the relaxed argmax when greedy.

        relaxed [B, V], q_code [B] = q(x), code [B] = x, u [B] uniform.
        """
        if self.greedy:
            return relaxed.argmax(-1) == code
        return u * q_code < relaxed.gather(-1, code[:, None])[:, 0]

    def draw(self, probs: Tensor, noise: Noise) -> Tensor:
        """Draw a code per sample, [B], from probs [B, V], not necessarily normalised."""
        if self.greedy:
            return probs.argmax(-1)
        return draw(probs, noise.fine(Noise.BONUS, 1))[:, 0]


def draws_of(count: int) -> int:
    """Return the number of independent draws in which `count` distinct codes are looked for."""
    return 1 if count == 1 else max(4 * count, 16)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Invert the CDF of probs [..., V], not necessarily normalised, at uniform u [..., M]: codes [..., M]."""
    cdf = probs.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cdf, u * cdf[..., -1:], right=True).clamp_(max=probs.shape[-1] - 1)
