"""The simplest relaxed rule, a baseline: draw from a mixture of the target and the drafter."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lanternpp.accept.base import DecayingAcceptance
from lanternpp.errors import InputError


class DraftMixture(DecayingAcceptance):
    """Follows (1 - t) p + t q, t = delta exp(-nu i) at the i-th level: a candidate is accepted without a test with probability t.

    The output is exactly t TV(p, q) from p in total variation, and acceptance rises by the same amount. The rule knows
    nothing of the codes, and is the baseline for rules that do. delta 0 is exact.
    """

    dials = frozenset({"delta", "nu"})
    requirements = "delta, the drafter's share of the mixture; 0 is exact"
    optimal_residual = True
    strength = "delta", 0.0, 1.0
    sliders: ClassVar = {"delta": (0, 1)}

    def __init__(self, delta: float, nu: float = 0.0):
        if not 0 <= delta <= 1:
            raise InputError(f"delta {delta} is outside [0, 1]; 0 is exact")
        super().__init__(nu)
        self.delta = delta

    def _mixed(self, p: Tensor, q: Tensor) -> Tensor:
        """Return (1 - t) p + t q, where p fills any mass that q lacks; p itself where a code has probability 1."""
        share = (p.amax(-1, keepdim=True) < 1).to(p.dtype) * (self.delta * self.decay_factor(p))
        return p + share * (q - p * q.sum(-1, keepdim=True))

    def accept_mass(self, p: Tensor, q: Tensor) -> Tensor:
        """Return the mixture's probability of every code."""
        return self._mixed(p, q)

    def relax_with_draft(self, p: Tensor, q: Tensor, code: Tensor) -> Tensor:
        """Return the mixture, whatever the candidate."""
        return self._mixed(p, q)

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """Return the mixture with a drafter that gives the code probability 1."""
        return self._mixed(p, torch.zeros_like(p).scatter_(-1, code[..., None], 1))
