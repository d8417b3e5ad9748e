"""LANTERN++ (arXiv 2502.06352): relaxed acceptance within a multiplicative bound."""

from __future__ import annotations

from typing import Self

from torch import Tensor

from lanternpp.accept.base import Dials, check_nu
from lanternpp.accept.neighbours import NeighbourAcceptance
from lanternpp.errors import InputError


class LanternPlusPlus(NeighbourAcceptance):
    """Neighbours lend at most (lambda - 1) p(x): a code the target finds unlikely stays unlikely."""

    dials = frozenset({"neighbours", "lam", "nu", "residual"})

    def __init__(self, table: Tensor, lam: float, residual: str | None = None, nu: float = 0.0):
        super().__init__(table, residual, nu)
        if not lam >= 1:
            raise InputError(f"lambda {lam} is below 1; 1 is exact")
        self.lam = lam

    @classmethod
    def build(cls, dials: Dials) -> Self:
        """From neighbours (k) and lambda."""
        if dials.neighbours is None or dials.lam is None:
            raise InputError("this rule needs neighbours and lambda; give both")
        return cls(dials.table(dials.neighbours), dials.lam, dials.residual, check_nu(dials.nu))

    def linear_budget(self, p: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """(lambda - 1) p(x)."""
        return 0.0, (self.lam - 1) * self.decay_factor(p)
