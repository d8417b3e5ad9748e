"""Continuous speculative decoding as published (arXiv 2411.11925), which verifies the trajectories of diffusion heads."""

from __future__ import annotations

from typing import Self

from torch import Tensor

from lanternpp.accept.base import Acceptance, Dials


class Cspd(Acceptance):
    """The target's density times the ratio of all earlier steps' widths; `engine/verify/latents.py` computes it.

    Codes have no trajectories: engines refuse it for them.
    """

    dials = frozenset()
    trajectories = True

    @classmethod
    def build(cls, dials: Dials) -> Self:
        """It has no dials."""
        return cls()

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """p unchanged."""
        return p
