"""Exact acceptance: speculative sampling (arXiv 2211.17192, 2302.01318; on trees, SpecInfer 2305.09781)."""

from __future__ import annotations

from typing import Self

from torch import Tensor

from lanternpp.accept.base import Acceptance, Dials


class Exact(Acceptance):
    """The output follows the target's distribution."""

    dials = frozenset()
    lossless = True

    @classmethod
    def build(cls, dials: Dials) -> Self:
        """It has no dials."""
        return cls()

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """p unchanged."""
        return p
