"""COOL-SD (arXiv 2601.09212): acceptance relaxed by a weight that falls with the level of the draft."""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor

from lanternpp.accept.base import Acceptance, Dials, optimal
from lanternpp.errors import InputError


class Cool(Acceptance):
    """Accepts x with min(1, w p(x) / q(x)), w = delta exp(-nu i) for the i-th level, from 0.

    relax gives x the mass min(1, w p(x)) and takes it from, or gives it to, all other codes in proportion.
    delta 1 and nu 0 are exact; so is, in law, every level whose w is at most 1, at the price of refusals.
    """

    dials = frozenset({"delta", "nu", "residual"})

    def __init__(self, delta: float, nu: float = 0.0, residual: str | None = None):
        if not 0 < delta < math.inf:
            raise InputError(f"delta {delta} is not a positive number; 1 is exact")
        if not 0 <= nu < math.inf:
            raise InputError(f"nu {nu} is negative or infinite; use 0 (the same at every level) or more")
        self.delta, self.nu = delta, nu
        self.optimal = optimal(residual, "optimal")
        self._weight = delta

    @classmethod
    def build(cls, dials: Dials) -> Self:
        """From delta and nu."""
        if dials.delta is None:
            raise InputError("this rule needs delta, the weight at the first level; 1 is exact")
        return cls(dials.delta, 0.0 if dials.nu is None else dials.nu, dials.residual)

    def at(self, level: int) -> Cool:
        """The rule whose weight is that of `level`; itself where that is the same."""
        weight = self.delta * math.exp(-self.nu * level)
        if weight == self._weight:
            return self
        rule = Cool(self.delta, self.nu, "optimal" if self.optimal else "paper")
        rule._weight = weight
        return rule

    def own(self, p: Tensor, q: Tensor) -> Tensor:
        """min(1, w p); a certain code stays certain."""
        return (self._weight * p).clamp(max=1).where(p < 1, p)

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """min(1, w p(x)) for the code, the rest in proportion to p."""
        at = code[..., None]
        before = p.gather(-1, at)
        after = self.own(before, before)
        others = (p / (1 - before)).where(before < 1, 0) * (1 - after)
        return others.scatter(-1, at, after)

    def residual(self, p: Tensor, relaxed: Tensor, q: Tensor, code: Tensor) -> Tensor:
        """As in `Acceptance`; a weight below 1 lowers its candidate, and then less than min(p, q) was let out."""
        if self.optimal and self._weight < 1:
            q = torch.minimum(q, self.own(p, q))
        return super().residual(p, relaxed, q, code)
