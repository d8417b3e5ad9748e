"""No draft: plain autoregressive decoding, in the loop that every method uses."""

from __future__ import annotations

from typing import Self

from lanternpp.engine.noise import Noise
from lanternpp.engine.proposer import Parts, Proposer
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.models.base import Target
from lanternpp.trees.static import chain_tree
from lanternpp.types import Draft


class NoDraft(Proposer):
    """Proposes the root alone, so that every pass decides one code."""

    dials = frozenset()
    size = 1
    depth = 0

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """Build the proposer, which needs none of the parts."""
        return cls()

    def check(self, target: Target) -> None:
        """Accept every target."""

    def open(self, target: Target, sampling: Sampling, guidance: Guidance, batch: int) -> None:
        """Allocate the state of a batch."""
        super().open(target, sampling, guidance, batch)
        self._tree = chain_tree(batch, 0, self.root.device)
        self.supports_fused_steps = type(self) is NoDraft

    def propose(self, noise: Noise) -> Draft:
        """Return a draft of the root."""
        return Draft(self._tree, self.root[:, None].clone(), None)
