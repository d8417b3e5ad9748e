"""COOL-SD (arXiv 2601.09212): acceptance relaxed by a weight that falls with the level of the draft."""

from __future__ import annotations

import math
from typing import Self

from torch import Tensor

from lanternpp.accept.base import Dials, check_nu, wants_optimal
from lanternpp.accept.scaled import ScaledAcceptance
from lanternpp.errors import InputError


class Cool(ScaledAcceptance):
    """Accepts x with min(1, w p(x) / q(x)), w = delta exp(-nu i) for the i-th level, from 0.

    delta 1 and nu 0 are exact; so is, in law, every level whose w is at most 1, at the price of refusals.
    """

    dials = frozenset({"delta", "nu", "residual"})

    def __init__(self, delta: float, nu: float = 0.0, residual: str | None = None):
        if not 0 < delta < math.inf:
            raise InputError(f"delta {delta} is not a positive number; 1 is exact")
        self.delta, self.nu = delta, check_nu(nu)
        self.optimal_residual = wants_optimal(residual, "optimal")

    @classmethod
    def build(cls, dials: Dials) -> Self:
        """From delta and nu."""
        if dials.delta is None:
            raise InputError("this rule needs delta, the weight at the first level; 1 is exact")
        return cls(dials.delta, 0.0 if dials.nu is None else dials.nu, dials.residual)

    def raised(self, p: Tensor) -> Tensor:
        """min(1, w p); a certain code stays certain."""
        return (self.delta * self.decay_factor(p) * p).clamp(max=1).where(p < 1, p)
