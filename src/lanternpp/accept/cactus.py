"""Cactus (ICLR 2026): the most acceptance that a bound on the divergence from the target allows."""

from __future__ import annotations

import math
from typing import Self

from torch import Tensor

from lanternpp.accept.base import Dials, check_nu, wants_optimal
from lanternpp.accept.scaled import ScaledAcceptance
from lanternpp.errors import InputError


class Cactus(ScaledAcceptance):
    """A candidate of probability p may grow to min(1, p + sqrt(2 d p (1 - p))), d = delta exp(-nu i) at the i-th level.

    The divergence KL from p of the relaxed distribution is then at most d, wherever the
    candidate ends at 1/2 or below: the rarer a code, the greater the factor. delta 0 is exact.
    """

    dials = frozenset({"delta", "nu", "residual"})

    def __init__(self, delta: float, nu: float = 0.0, residual: str | None = None):
        if not 0 <= delta < math.inf:
            raise InputError(f"delta {delta} is negative or infinite; 0 is exact, 0.001 a start")
        self.delta, self.nu = delta, check_nu(nu)
        self.optimal_residual = wants_optimal(residual, "optimal")

    @classmethod
    def build(cls, dials: Dials) -> Self:
        """From delta and nu."""
        if dials.delta is None:
            raise InputError("this rule needs delta, the divergence a candidate may cost; 0 is exact")
        return cls(dials.delta, check_nu(dials.nu), dials.residual)

    def raised(self, p: Tensor) -> Tensor:
        """min(1, p + sqrt(2 d p (1 - p)))."""
        return (p + (2 * self.delta * self.decay_factor(p) * p * (1 - p)).sqrt()).clamp(max=1)
