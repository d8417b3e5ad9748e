"""COOL-SD (arXiv 2601.09212) and Cactus (arXiv 2604.04987): the candidate's probability grows, all others shrink in proportion."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lanternpp.accept.base import DecayingAcceptance
from lanternpp.errors import InputError


class ScaledAcceptance(DecayingAcceptance):
    """Gives the candidate the mass `raised`, and scales the probabilities of all other codes by one factor.

    Raises InputError unless delta is in (0, inf), or 0 where `zero` says that it is exact.
    """

    dials = frozenset({"delta", "nu", "residual"})
    zero: bool

    def __init__(self, delta: float, nu: float = 0.0, residual: str | None = None):
        if not (0 < delta < math.inf or (self.zero and delta == 0)):
            fault = "is not a positive number; 1 is exact"
            if self.zero:
                fault = "is negative or infinite; 0 is exact, 0.001 a start"
            raise InputError(f"delta {delta} {fault}")
        super().__init__(nu, residual)
        self.delta = delta

    @abstractmethod
    def raised(self, p: Tensor) -> Tensor:
        """Return the relaxed probability of candidates of probability p [..., V or 1], the same shape; 1 stays 1."""

    def accept_mass(self, p: Tensor, q: Tensor) -> Tensor:
        """Return `raised` of every code."""
        return self.raised(p)

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """Return p with `raised` for the code, and all other codes in proportion to p."""
        p_code = p.gather(-1, code[..., None])
        raised = self.raised(p_code)
        relaxed = (p / (1 - p_code)).where(p_code < 1, 0) * (1 - raised)
        return relaxed.scatter(-1, code[..., None], raised)

    def residual(self, p: Tensor, relaxed: Tensor, q: Tensor, code: Tensor) -> Tensor:
        """As in `Acceptance`; the accepted mass is min(q, raised(p)), which may be below min(p, q) for a lowered candidate."""
        if self.optimal_residual:
            q = torch.minimum(q, self.raised(p))
        return super().residual(p, relaxed, q, code)


class Cool(ScaledAcceptance):
    """Accepts x with min(1, w p(x) / q(x)), w = delta exp(-nu i) for the i-th level, from 0.

    delta 1 and nu 0 are exact; so is, with the optimal residual, every level whose w is at most 1; token-wise verification then
    rejects more.
    """

    zero, requirements = False, "delta, the weight at the first level; 1 is exact"
    strength = "delta", 1.0, 100.0
    sliders: ClassVar = {"delta": (0.01, 3)}

    def raised(self, p: Tensor) -> Tensor:
        """Return min(1, w p); a code of probability 1 keeps it."""
        return (self.delta * self.decay_factor(p) * p).clamp(max=1).where(p < 1, p)


class Cactus(ScaledAcceptance):
    """A candidate of probability p may grow to min(1, p + sqrt(2 d p (1 - p))), d = delta exp(-nu i) at the i-th level.

    The divergence KL from p of the relaxed distribution is then at most d, wherever the candidate ends at 1/2 or below: the
    rarer a code, the greater the factor. delta 0 is exact.
    """

    zero, requirements = True, "delta, the divergence a candidate may cost; 0 is exact"
    strength = "delta", 0.0, 10.0

    def raised(self, p: Tensor) -> Tensor:
        """Return min(1, p + sqrt(2 d p (1 - p)))."""
        return (p + (2 * self.delta * self.decay_factor(p) * p * (1 - p)).sqrt()).clamp(max=1)
