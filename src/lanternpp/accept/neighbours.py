"""The relaxation both LANTERN rules share: probable neighbours lend their mass to the candidate."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from lanternpp.accept.base import Acceptance


class NeighbourAcceptance(Acceptance):
    """Moves onto the code the mass of its nearest codebook neighbours, as many as a budget allows.

    table [V, k] holds the k nearest codes of every code, nearest first, itself excluded.
    """

    def __init__(self, table: Tensor):
        self.table = table

    @abstractmethod
    def budget(self, p_code: Tensor) -> Tensor | float:
        """The most mass that neighbours may lend, given p of the candidate [...]."""

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """The longest prefix A of the neighbours with p(A) <= budget lends all its mass to the code."""
        near = self.table[code].long()  # [..., k]
        mass = p.gather(-1, near)
        at = code[..., None]
        p_code = p.gather(-1, at)
        total = mass.cumsum(-1)
        inside = total <= self.budget(p_code)
        lent = mass * inside
        relaxed = p.scatter(-1, near, mass - lent)
        return relaxed.scatter(-1, at, p_code + lent.sum(-1, keepdim=True))
