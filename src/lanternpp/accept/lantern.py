"""LANTERN (arXiv 2410.03355): relaxed acceptance within an additive bound."""

from __future__ import annotations

from typing import Self

from torch import Tensor

from lanternpp.accept.base import Dials, check_nu
from lanternpp.accept.neighbours import NeighbourAcceptance
from lanternpp.errors import InputError


class Lantern(NeighbourAcceptance):
    """Neighbours lend at most delta, so that the total variation between p and relax(p, x) is at most delta."""

    dials = frozenset({"neighbours", "delta", "nu", "residual"})

    def __init__(self, table: Tensor, delta: float, residual: str | None = None, nu: float = 0.0):
        super().__init__(table, residual, nu)
        if not 0 <= delta <= 1:
            raise InputError(f"delta {delta} is outside [0, 1]; 0 is exact")
        self.delta = delta

    @classmethod
    def build(cls, dials: Dials) -> Self:
        """From neighbours (k) and delta."""
        if dials.neighbours is None or dials.delta is None:
            raise InputError("this rule needs neighbours and delta; give both")
        return cls(dials.table(dials.neighbours), dials.delta, dials.residual, check_nu(dials.nu))

    def linear_budget(self, p: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """delta, whatever the code."""
        return self.delta * self.decay_factor(p), 0.0
