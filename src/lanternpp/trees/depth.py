"""Dynamic depth decoding (DDD, arXiv 2409.00142): a dynamic tree whose depth is decided while it is drafted."""

from __future__ import annotations

import math

from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.trees.dynamic import DynamicTree


class DepthTree(DynamicTree):
    """Stops drafting at a level where the beam has little likelihood left.

    The log-sum-exp of the beam's summed log q is the drafter's probability that the decoded path runs
    through the beam at all. From level `start` on, a sample stops once that falls below `threshold`. The default, 5 %,
    is about the cost of a level: the time of a one-layer drafter's pass relative to its target's. On a CPU levels at
    which every sample has stopped are not computed; on other devices they are computed and discarded.
    """

    def __init__(
        self,
        beam: int = 10,
        depth: int = 8,
        nodes: int = 59,
        start: int = 2,
        threshold: float = math.log(0.05),
    ):
        super().__init__(beam, depth, nodes)
        if start < 1:
            raise InputError(f"start {start} is below 1; the first level to stop at is 1")
        self.start, self.threshold = start, threshold

    def enough(self, depth: int, beam: Tensor) -> Tensor | None:
        """The samples whose beam holds less than the threshold."""
        return beam.logsumexp(-1) < self.threshold if depth >= self.start else None
