"""Exact acceptance: speculative sampling (arXiv 2211.17192, 2302.01318; on trees, SpecInfer 2305.09781)."""

from __future__ import annotations

from torch import Tensor

from lanternpp.accept.base import Acceptance


class Exact(Acceptance):
    """The output follows the target's distribution."""

    lossless = True

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """p unchanged."""
        return p
