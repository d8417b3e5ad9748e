"""The relaxation that both LANTERN rules share: the candidate gets the probability of its nearest codes."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.accept.base import DecayingAcceptance, check_nu, wants_optimal
from lanternpp.types import NeighbourBudget, on_host

RELAXING = (
    "relax",
    "relax_with_draft",
    "budget",
    "residual",
    "accept_mass",
    "optimal_distribution",
    "output_distribution",
)
"""The functions that decide, with `linear_budget`, how such a rule relaxes."""
FIRST = 16  # nearest neighbours that are summed for all codes together
MORE = 64  # neighbours per chunk after that, for the codes whose budget is not used up


class NeighbourAcceptance(DecayingAcceptance):
    """Moves the mass of a code's nearest codebook neighbours onto it, as many of them as a budget allows.

    table [V, k] holds the k nearest codes of every code, nearest first, itself excluded.

    The papers' residual costs no more than the optimal one. With M = sum [p - q]+ and S = sum [a - p]+, a refusal has
    probability M - S. The papers' residual of x is [p - q]+ without its lenders A, over M less what they held of it, at
    most p(A); and S >= p(A), as a refused x had all of A let out. So no code gets more than [p - q]+, which is all that
    S being the distance takes.
    """

    paper_residual_is_optimal = True

    def __init__(self, table: Tensor, residual: str | None = None, nu: float = 0.0):
        self.table, self.nu = table, check_nu(nu)
        self.optimal_residual = wants_optimal(residual, "paper")

    @abstractmethod
    def linear_budget(self, p: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """(a, b) of a budget a + b p, for p [..., 1 or V]; tensors [..., 1] where levels differ."""

    def budget(self, p: Tensor) -> Tensor:
        """The most mass that neighbours may lend to candidates of probability p [..., 1 or V], the same shape."""
        a, b = self.linear_budget(p)
        return a + b * p

    def as_numbers(self, levels: int) -> NeighbourBudget | None:
        """As `Acceptance.as_numbers`; None for a rule that relaxes in a way of its own."""
        table = self.table
        own = any(getattr(type(self), name) is not getattr(NeighbourAcceptance, name) for name in RELAXING)
        if own or table.dtype != torch.int32:
            return None
        none = table.new_empty(0)
        rules = [self.at(level) for level in range(levels if self.nu else min(levels, 1))]
        pairs = tuple((float(a), float(b)) for a, b in (rule.linear_budget(none) for rule in rules))
        return NeighbourBudget(table, pairs if self.nu else pairs * levels, self.optimal_residual)

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """The longest prefix A of the neighbours with p(A) <= budget lends all its mass to the code.

        A code of probability 1 never lends: the format forces it (row ends, the end of the image).
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

    def accept_mass(self, p: Tensor, q: Tensor) -> Tensor:
        """p(y) plus the mass its neighbours lend, computed without the relaxed distributions.

        Most codes use up their budget after a few neighbours, or reach q(y), beyond which the value does not matter.
        On a CPU the first neighbours are summed one after another, as that reads little memory, and the remaining ones for
        the other codes alone. On other devices many are summed at once, for all codes, which needs no transfer to the host.
        """
        rows, q = p.flatten(0, -2).T.contiguous(), q.flatten(0, -2).T  # [V, M]: of a neighbour a row is read
        limit = self.budget(p).flatten(0, -2).T.contiguous()
        total, mass_of = torch.zeros_like(rows), rows.clone()
        if not on_host(p):
            for near in self.table.split(MORE, 1):
                lent, total = _lend(F.embedding(near, rows), total, limit)  # [V, M]
                mass_of += lent
            return mass_of.T.reshape(p.shape)
        lenders, lent = rows.where(rows < 1, float("inf")), torch.zeros_like(rows)
        for near in self.table[:, :FIRST].T:
            total += lenders.index_select(0, near)
            lent = total.where(total <= limit, lent)  # of the longest prefix within the limit
        mass_of += lent
        if FIRST < self.table.shape[1]:
            code, row = ((total <= limit) & (mass_of < q)).nonzero(as_tuple=True)  # [m]
            for near in self.table[:, FIRST:].split(MORE, 1):
                most = limit[code, row]
                lent, last = _lend(rows[near[code].long(), row[:, None]], total[code, row], most)
                mass_of[code, row] += lent
                total[code, row] = last
                more = (last <= most) & (mass_of[code, row] < q[code, row])
                code, row = code[more], row[more]
                if not len(code):
                    break
        return mass_of.T.reshape(p.shape)


def _lend(mass: Tensor, total: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """mass [V or m, k, ...] of k more neighbours behind others that hold `total` -> what they lend, and the new total."""
    sums = mass.cumsum(1) + total[:, None]
    inside = (sums <= limit[:, None]) & (mass < 1)
    return (mass * inside).sum(1), sums[:, -1]
