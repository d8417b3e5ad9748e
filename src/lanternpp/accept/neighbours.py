"""LANTERN (arXiv 2410.03355) and LANTERN++ (arXiv 2502.06352): a candidate gets the probability of its nearest codes."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.accept.base import DecayingAcceptance
from lanternpp.errors import InputError
from lanternpp.types import NeighbourBudget, on_host

RELAXING = (
    "relax",
    "relax_with_draft",
    "budget",
    "residual",
    "accept_mass",
    "output_distribution",
)
"""The functions that decide, with `linear_budget`, how such a rule relaxes."""
FIRST = 16  # nearest neighbours that are summed for all codes together
MORE = 64  # neighbours per chunk after that, for the codes whose budget is not used up


class NeighbourAcceptance(DecayingAcceptance):
    """Moves the mass of a code's nearest codebook neighbours onto it, as many of them as a budget allows.

    table [V, k] holds the k nearest codes of every code, nearest first, itself excluded.

    The papers' residual costs no more than the optimal one. With M = sum [p - q]+ and S = sum [a - p]+, a rejection has
    probability M - S. The papers' residual of x is [p - q]+ without the neighbours A whose mass was moved, divided by M
    less their part of it, which is at most p(A); and S >= p(A), as a rejected x had all of A accepted. So no code gets more
    than [p - q]+, and S is the distance.
    """

    paper_residual_is_optimal = True
    usual_residual = "paper"

    def __init__(self, table: Tensor, residual: str | None = None, nu: float = 0.0):
        super().__init__(nu, residual)
        self.table = table

    @abstractmethod
    def linear_budget(self, p: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """(a, b) of a budget a + b p, for p [..., 1 or V]; tensors [..., 1] where levels differ."""

    def budget(self, p: Tensor) -> Tensor:
        """The most mass that is moved to candidates of probability p [..., 1 or V], the same shape."""
        a, b = self.linear_budget(p)
        return a + b * p

    def as_numbers(self, levels: int) -> NeighbourBudget | None:
        """As `Acceptance.as_numbers`; None for a rule that relaxes in a way of its own."""
        table = self.table
        other = any(getattr(type(self), name) is not getattr(NeighbourAcceptance, name) for name in RELAXING)
        if other or table.dtype != torch.int32:
            return None
        none, rules = table.new_empty(0), [self.at(level) for level in range(levels)]
        if any(type(rule) is not type(self) or rule.table is not self.table for rule in rules):
            return None
        pairs = tuple((float(a), float(b)) for a, b in (rule.linear_budget(none) for rule in rules))
        return NeighbourBudget(table, pairs, self.optimal_residual)

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """All mass of the longest prefix A of the neighbours with p(A) <= budget is moved to the code.

        The mass of a code of probability 1 never is: the format forces it (row ends, the end of the image).
        """
        near = self.table[code].long()  # [..., k]
        mass = p.gather(-1, near)
        at = code[..., None]
        p_code = p.gather(-1, at)
        total = mass.cumsum(-1)
        inside = (total <= self.budget(p_code)) & (mass < 1)
        moved = mass * inside
        relaxed = p.scatter(-1, near, mass - moved)
        return relaxed.scatter(-1, at, p_code + moved.sum(-1, keepdim=True))

    def accept_mass(self, p: Tensor, q: Tensor) -> Tensor:
        """p(y) plus the mass moved from its neighbours, computed without the relaxed distributions.

        Most codes use up their budget after a few neighbours, or reach q(y), above which the value does not matter.
        On a CPU the first neighbours are summed one after another, as that reads little memory, and the remaining ones for
        the other codes alone. On other devices many are summed at once, for all codes, which needs no transfer to the host.
        """
        rows, q = p.flatten(0, -2).T.contiguous(), q.flatten(0, -2).T  # [V, M]: a neighbour is a row
        limit = self.budget(p).flatten(0, -2).T.contiguous()
        total, mass_of = torch.zeros_like(rows), rows.clone()
        if not on_host(p):
            for near in self.table.split(MORE, 1):
                moved, total = _moved_mass(F.embedding(near, rows), total, limit)  # [V, M]
                mass_of += moved
            return mass_of.T.reshape(p.shape)
        donors, moved = rows.where(rows < 1, float("inf")), torch.zeros_like(rows)
        for near in self.table[:, :FIRST].T:
            total += donors.index_select(0, near)
            moved = total.where(total <= limit, moved)  # of the longest prefix within the limit
        mass_of += moved
        if FIRST < self.table.shape[1]:
            code, row = ((total <= limit) & (mass_of < q)).nonzero(as_tuple=True)  # [m]
            for near in self.table[:, FIRST:].split(MORE, 1):
                most = limit[code, row]
                moved, last = _moved_mass(rows[near[code].long(), row[:, None]], total[code, row], most)
                mass_of[code, row] += moved
                total[code, row] = last
                more = (last <= most) & (mass_of[code, row] < q[code, row])
                code, row = code[more], row[more]
                if not len(code):
                    break
        return mass_of.T.reshape(p.shape)


class Lantern(NeighbourAcceptance):
    """Neighbours give at most delta, so that the total variation between p and relax(p, x) is at most delta."""

    dials = frozenset({"neighbours", "delta", "nu", "residual"})
    required, missing = ("neighbours", "delta"), "neighbours and delta; give both"
    sliders: ClassVar = {"delta": (0, 1)}

    def __init__(self, table: Tensor, delta: float, residual: str | None = None, nu: float = 0.0):
        super().__init__(table, residual, nu)
        if not 0 <= delta <= 1:
            raise InputError(f"delta {delta} is outside [0, 1]; 0 is exact")
        self.delta = delta

    def linear_budget(self, p: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """delta, whatever the code."""
        return self.delta * self.decay_factor(p), 0.0


class LanternPlusPlus(NeighbourAcceptance):
    """Neighbours give at most (lambda - 1) p(x): a code the target finds unlikely stays unlikely."""

    dials = frozenset({"neighbours", "lam", "nu", "residual"})
    required, missing = ("neighbours", "lam"), "neighbours and lambda; give both"

    def __init__(self, table: Tensor, lam: float, residual: str | None = None, nu: float = 0.0):
        super().__init__(table, residual, nu)
        if not lam >= 1:
            raise InputError(f"lambda {lam} is below 1; 1 is exact")
        self.lam = lam

    def linear_budget(self, p: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """(lambda - 1) p(x)."""
        return 0.0, (self.lam - 1) * self.decay_factor(p)


def _moved_mass(mass: Tensor, total: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """mass [V or m, k, ...] of k more neighbours, after others that hold `total` -> the moved mass, and the new total."""
    sums = mass.cumsum(1) + total[:, None]
    inside = (sums <= limit[:, None]) & (mass < 1)
    return (mass * inside).sum(1), sums[:, -1]
