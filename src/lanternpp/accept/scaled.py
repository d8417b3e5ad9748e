"""The relaxation of rules without neighbours: the candidate's probability grows, all others shrink in proportion."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from lanternpp.accept.base import DecayingAcceptance


class ScaledAcceptance(DecayingAcceptance):
    """Gives the candidate the mass `raised`, and takes the difference from, or gives it to, all other codes alike."""

    @abstractmethod
    def raised(self, p: Tensor) -> Tensor:
        """Probabilities [..., V or 1] -> what each becomes where its code is the candidate; 1 stays 1."""

    def accept_mass(self, p: Tensor, q: Tensor) -> Tensor:
        """`raised` of every code."""
        return self.raised(p)

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """`raised` for the code, the rest in proportion to p."""
        at = code[..., None]
        before = p.gather(-1, at)
        after = self.raised(before)
        others = (p / (1 - before)).where(before < 1, 0) * (1 - after)
        return others.scatter(-1, at, after)

    def residual(self, p: Tensor, relaxed: Tensor, q: Tensor, code: Tensor) -> Tensor:
        """As in `Acceptance`; the accepted mass is min(q, raised(p)), which may be below min(p, q) for a lowered candidate."""
        return super().residual(
            p, relaxed, torch.minimum(q, self.raised(p)) if self.optimal_residual else q, code
        )
