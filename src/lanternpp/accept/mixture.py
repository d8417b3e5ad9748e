"""The plainest relaxed rule: draw from a mixture of the target and the drafter."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from lanternpp.accept.base import DecayingAcceptance, Dials, check_nu
from lanternpp.errors import InputError


class Mixture(DecayingAcceptance):
    """Follows (1 - t) p + t q, t = delta exp(-nu i) at the i-th level: a candidate passes unjudged with probability t.

    It costs exactly t times the total variation between p and q, and buys as much acceptance. Every rule that
    knows more than that of the codes must beat it at equal cost. delta 0 is exact.
    """

    dials = frozenset({"delta", "nu"})
    optimal_residual = True

    def __init__(self, delta: float, nu: float = 0.0):
        if not 0 <= delta <= 1:
            raise InputError(f"delta {delta} is outside [0, 1]; 0 is exact")
        self.delta, self.nu = delta, check_nu(nu)

    @classmethod
    def build(cls, dials: Dials) -> Self:
        """From delta and nu."""
        if dials.delta is None:
            raise InputError("this rule needs delta, the drafter's share of the mixture; 0 is exact")
        return cls(dials.delta, check_nu(dials.nu))

    def accept_mass(self, p: Tensor, q: Tensor) -> Tensor:
        """(1 - t) p + t q; p where it is certain of a code, and in place of what mass q lacks."""
        share = self.delta * self.decay_factor(p) * (p.amax(-1, keepdim=True) < 1)
        return p + share * (q - p * q.sum(-1, keepdim=True))

    def relax_with_draft(self, p: Tensor, q: Tensor, code: Tensor) -> Tensor:
        """The mixture, whatever the candidate."""
        return self.accept_mass(p, q)

    def output_law(self, p: Tensor, q: Tensor) -> Tensor:
        """The mixture itself."""
        return self.accept_mass(p, q)

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """The mixture with a drafter that is sure of the code."""
        return self.accept_mass(p, torch.zeros_like(p).scatter_(-1, code[..., None], 1))
