"""LANTERN (arXiv 2410.03355): relaxed acceptance within an additive bound."""

from __future__ import annotations

from torch import Tensor

from lanternpp.accept.neighbours import NeighbourAcceptance
from lanternpp.errors import InputError


class Lantern(NeighbourAcceptance):
    """Neighbours lend at most delta: the total variation between p and relax(p, x) stays within it."""

    def __init__(self, table: Tensor, delta: float):
        super().__init__(table)
        if not 0 <= delta <= 1:
            raise InputError(f"delta {delta} is outside [0, 1]; 0 is exact")
        self.delta = delta

    def budget(self, p_code: Tensor) -> float:
        """delta, whatever the code."""
        return self.delta
