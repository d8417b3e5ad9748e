"""What `verify` asks of an acceptance rule: how it bends p in favour of a candidate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from torch import Tensor


@dataclass(frozen=True)
class Dials:
    """What a rule may be built from; each takes what it needs."""

    table: Callable[[int], Tensor]  # k -> the k nearest codes of every code, [V, k] int32
    neighbours: int | None = None  # k
    delta: float | None = None
    lam: float | None = None  # lambda


class Acceptance(ABC):
    """A rule over distributions of V codes. `exact` returns p itself; relaxed rules move mass onto the code."""

    lossless: bool = False

    @classmethod
    @abstractmethod
    def build(cls, dials: Dials) -> Self:
        """The rule with these dials; InputError where one is missing or out of range."""

    @abstractmethod
    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """p [..., V] and a candidate [...] -> the distribution it is judged by, [..., V]; sums to 1."""

    def residual(self, p: Tensor, relaxed: Tensor, q: Tensor, code: Tensor) -> Tensor:
        """What is left to draw from once the candidate is refused, [..., V]: [relaxed - q]+ normalised.

        Where nothing is left (q covers the relaxed distribution) it is the relaxed distribution itself.
        p, relaxed and q [..., V], code [...].
        """
        left = (relaxed - q).clamp_(min=0)
        mass = left.sum(-1, keepdim=True)
        return (left / mass).where(mass > 0, relaxed)
