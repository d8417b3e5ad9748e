"""Rules that leave the target's distribution as it is."""

from __future__ import annotations

from typing import Self

from torch import Tensor

from lanternpp.accept.base import Acceptance, Dials
from lanternpp.types import NeighbourBudget


class Exact(Acceptance):
    """The output follows the target (speculative sampling, arXiv 2211.17192, 2302.01318; on trees, SpecInfer, 2305.09781)."""

    dials = frozenset()
    lossless = True

    @classmethod
    def build(cls, dials: Dials) -> Self:
        """Build the rule, which has no dials."""
        return cls()

    def as_numbers(self, levels: int) -> NeighbourBudget | None:
        """Return budgets of 0; None for a class that derives from this class."""
        return NeighbourBudget(None, ((0.0, 0.0),) * levels, False) if type(self) is Exact else None

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """Return p unchanged."""
        return p


class Cspd(Exact):
    """Continuous speculative decoding as published (arXiv 2411.11925), for trajectories of diffusion heads; not exact.

    `engine/latent_decode.py` multiplies the target's density by the ratio of all earlier steps' widths. Codes have no
    trajectories: engines of codes reject this rule.
    """

    lossless = False
    trajectories = True
