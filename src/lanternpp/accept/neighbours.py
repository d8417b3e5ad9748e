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

# The methods that decide, with `linear_budget`, how a `NeighbourAcceptance` relaxes.
DECIDING = ("relax", "relax_with_draft", "budget", "residual", "accept_mass", "output_distribution")
NUM_FIRST = 16  # nearest neighbours that are summed for all codes together
CHUNK = 64  # further neighbours that are summed at once, for the codes whose budget is not used up


class NeighbourAcceptance(DecayingAcceptance):
    """Moves the mass of a candidate's nearest codebook neighbours onto the candidate, as many of them as a budget allows.

    table [V, k] holds the k nearest codes of every code, nearest first, without the code itself.

    The papers' residual costs no more than the optimal one. With M = sum [p - q]+ and S = sum [a - p]+, a rejection has
    probability M - S. The papers' residual of x is [p - q]+ without the neighbours A whose mass was moved, divided by M
    less their part of it, which is at most p(A); and S >= p(A), as a rejected x had all of A accepted. So no code gets more
    than [p - q]+, and S is the distance.
    """

    paper_residual_is_optimal = True
    default_residual = "paper"

    def __init__(self, table: Tensor, residual: str | None = None, nu: float = 0.0):
        super().__init__(nu, residual)
        self.table = table

    @abstractmethod
    def linear_budget(self, p: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """Return (a, b) of a budget a + b p, for p [..., 1 or V]; tensors [..., 1] where levels differ."""

    def budget(self, p: Tensor) -> Tensor:
        """Return the maximum mass that is moved to candidates of probability p [..., 1 or V], the same shape."""
        a, b = self.linear_budget(p)
        return a + b * p

    def as_numbers(self, levels: int) -> NeighbourBudget | None:
        """Return the rule as `Acceptance.as_numbers` does; None for a class that overrides a method of `DECIDING`."""
        cls, table = type(self), self.table
        overrides = any(getattr(cls, name) is not getattr(NeighbourAcceptance, name) for name in DECIDING)
        if overrides or table.dtype != torch.int32:
            return None
        rules = [self.at(level) for level in range(levels)]
        if any(type(rule) is not cls or rule.table is not table for rule in rules):
            return None
        budgets = [rule.linear_budget(table.new_empty(0)) for rule in rules]
        return NeighbourBudget(table, tuple((float(a), float(b)) for a, b in budgets), self.optimal_residual)

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """Move all mass of the longest prefix A of the neighbours with p(A) <= budget to the code.

        The mass of a code of probability 1 is never moved: the format forces that code (row ends, the end of the image).
        """
        neighbours = self.table[code].long()  # [..., k]
        mass = p.gather(-1, neighbours)
        p_code = p.gather(-1, code[..., None])
        within_budget = (mass.cumsum(-1) <= self.budget(p_code)) & (mass < 1)
        moved = mass * within_budget
        relaxed = p.scatter(-1, neighbours, mass - moved)
        return relaxed.scatter(-1, code[..., None], p_code + moved.sum(-1, keepdim=True))

    def accept_mass(self, p: Tensor, q: Tensor) -> Tensor:
        """Return p(y) plus the mass moved from the neighbours of y, computed without the relaxed distributions.

        Most codes use up their budget after a few neighbours, or reach q(y), above which the value does not matter. On a
        CPU the first neighbours are summed one after another for all codes, which reads little memory, and further
        neighbours for unfinished codes alone. On other devices chunks of neighbours are summed for all codes, which needs
        no transfer to the host.
        """
        p_by_code = _by_code(p.reshape(-1, p.shape[-1]))
        q_by_code = q.reshape(-1, q.shape[-1]).T  # [V, M]
        budget = self.budget(p).reshape(-1, p.shape[-1]).T.contiguous()
        total, accepted = torch.zeros_like(p_by_code), p_by_code.clone()
        if not on_host(p):
            for neighbours in self.table.split(CHUNK, 1):
                moved, total = _moved_mass(F.embedding(neighbours, p_by_code), total, budget)  # [V, M]
                accepted += moved
            return accepted.T.reshape(p.shape)
        movable, moved = p_by_code.where(p_by_code < 1, float("inf")), torch.zeros_like(p_by_code)
        for neighbour in self.table[:, :NUM_FIRST].T:  # [V]
            total += movable.index_select(0, neighbour)
            moved = total.where(total <= budget, moved)  # the mass of the longest prefix within the budget
        accepted += moved
        if NUM_FIRST < self.table.shape[1]:
            # the codes y, and the indices m of their distributions, that are unfinished, [n] each
            y, m = ((total <= budget) & (accepted < q_by_code)).nonzero(as_tuple=True)
            for neighbours in self.table[:, NUM_FIRST:].split(CHUNK, 1):
                mass = p_by_code[neighbours[y].long(), m[:, None]]  # [n, CHUNK]
                moved, total[y, m] = _moved_mass(mass, total[y, m], budget[y, m])
                accepted[y, m] += moved
                unfinished = (total[y, m] <= budget[y, m]) & (accepted[y, m] < q_by_code[y, m])
                y, m = y[unfinished], m[unfinished]
                if not len(y):
                    break
        return accepted.T.reshape(p.shape)


class Lantern(NeighbourAcceptance):
    """Neighbours give at most delta, so that the total variation between p and relax(p, x) is at most delta."""

    dials = frozenset({"neighbours", "delta", "nu", "residual"})
    required, requirements = ("neighbours", "delta"), "neighbours and delta; give both"
    strength = "delta", 0.0, 1.0
    sliders: ClassVar = {"delta": (0, 1)}

    def __init__(self, table: Tensor, delta: float, residual: str | None = None, nu: float = 0.0):
        super().__init__(table, residual, nu)
        if not 0 <= delta <= 1:
            raise InputError(f"delta {delta} is outside [0, 1]; 0 is exact")
        self.delta = delta

    def linear_budget(self, p: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """Return a budget of delta exp(-nu i) for every code."""
        return self.delta * self.decay_factor(p), 0.0


class LanternPlusPlus(NeighbourAcceptance):
    """Neighbours give at most (lambda - 1) p(x): a code the target finds unlikely stays unlikely."""

    dials = frozenset({"neighbours", "lam", "nu", "residual"})
    required, requirements = ("neighbours", "lam"), "neighbours and lambda; give both"
    strength = "lam", 1.0, 100.0

    def __init__(self, table: Tensor, lam: float, residual: str | None = None, nu: float = 0.0):
        super().__init__(table, residual, nu)
        if not lam >= 1:
            raise InputError(f"lambda {lam} is below 1; 1 is exact")
        self.lam = lam

    def linear_budget(self, p: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """Return a budget of (lambda - 1) exp(-nu i) p(x)."""
        return 0.0, (self.lam - 1) * self.decay_factor(p)


@torch.library.custom_op("lanternpp::by_code", mutates_args=())
def _by_code(p: Tensor) -> Tensor:
    """Copy p [M, V] to [V, M], so that a neighbour is a row. torch.compile would compute p for every neighbour of every code."""
    return p.T.clone(memory_format=torch.contiguous_format)


@_by_code.register_fake
def _(p: Tensor) -> Tensor:
    return p.new_empty(p.shape[1], p.shape[0])


def _moved_mass(mass: Tensor, total: Tensor, budget: Tensor) -> tuple[Tensor, Tensor]:
    """Return the moved mass of k neighbours, mass [V or n, k, ...], and the new `total`, the mass of all nearer neighbours."""
    sums = mass.cumsum(1) + total[:, None]
    within_budget = (sums <= budget[:, None]) & (mass < 1)
    return (mass * within_budget).sum(1), sums[:, -1]
