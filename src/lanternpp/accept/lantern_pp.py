"""LANTERN++ (arXiv 2502.06352): relaxed acceptance within a multiplicative bound."""

from __future__ import annotations

from torch import Tensor

from lanternpp.accept.neighbours import NeighbourAcceptance
from lanternpp.errors import InputError


class LanternPlusPlus(NeighbourAcceptance):
    """Neighbours lend at most (lambda - 1) p(x): a code the target finds unlikely stays unlikely."""

    def __init__(self, table: Tensor, lam: float):
        super().__init__(table)
        if not lam >= 1:
            raise InputError(f"lambda {lam} is below 1; 1 is exact")
        self.lam = lam

    def budget(self, p_code: Tensor) -> Tensor:
        """(lambda - 1) p(x)."""
        return (self.lam - 1) * p_code
