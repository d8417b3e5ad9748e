"""The relaxation both LANTERN rules share: probable neighbours lend their mass to the candidate."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from lanternpp.accept.base import Acceptance, offered, optimal


class NeighbourAcceptance(Acceptance):
    """Moves onto the code the mass of its nearest codebook neighbours, as many as a budget allows.

    table [V, k] holds the k nearest codes of every code, nearest first, itself excluded.
    """

    def __init__(self, table: Tensor, residual: str | None = None):
        self.table = table
        self.optimal = optimal(residual, "paper")

    @abstractmethod
    def budget(self, p_code: Tensor) -> Tensor | float:
        """The most mass that neighbours may lend, given p of the candidate [...]."""

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """The longest prefix A of the neighbours with p(A) <= budget lends all its mass to the code.

        A code that is certain never lends: the format forces it (row ends, the end of the image).
        """
        near = self.table[code].long()  # [..., k]
        mass = p.gather(-1, near)
        at = code[..., None]
        p_code = p.gather(-1, at)
        total = mass.cumsum(-1)
        inside = (total <= self.budget(p_code)) & (mass < 1)
        lent = mass * inside
        relaxed = p.scatter(-1, near, mass - lent)
        return relaxed.scatter(-1, at, p_code + lent.sum(-1, keepdim=True))

    def own(self, p: Tensor, q: Tensor) -> Tensor:
        """p(y) and what its neighbours lend, without the relaxed distributions themselves."""
        own = p.clone()
        for codes in offered(q, len(p) * self.table.shape[1]):
            own[:, codes] += self._lent(p, codes)[0].sum(-1)
        return own

    def spent(self, p: Tensor, q: Tensor) -> Tensor:
        """The same for both residuals, so the papers' needs no enumeration.

        With M = sum [p - q]+ and S = sum [a - p]+, a refusal has probability M - S. The papers' residual of x
        is [p - q]+ without its lenders A, over M less what they held of it, at most p(A); and S >= p(A), as a
        refused x had all of A let out. So no code gets more than [p - q]+, which is all that S being the
        distance takes.
        """
        return self.beyond(p, q)

    def _lent(self, p: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """What each neighbour lends to each of `codes` [m], [B, m, k], and who they are, [m, k]."""
        near = self.table[codes].long()
        mass = p[:, near]
        inside = (mass.cumsum(-1) <= self.budget(p[:, codes, None])) & (mass < 1)
        return mass * inside, near
