"""What `verify` asks of an acceptance rule: how it bends p in favour of a candidate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from lanternpp.errors import InputError

RESIDUALS = ("paper", "optimal")


@dataclass(frozen=True)
class Dials:
    """What a rule may be built from; each takes what it needs."""

    table: Callable[[int], Tensor]  # k -> the k nearest codes of every code, [V, k] int32
    neighbours: int | None = None  # k
    delta: float | None = None
    lam: float | None = None  # lambda
    nu: float | None = None  # how fast a weight decays with the level of the draft
    residual: str | None = None  # one of RESIDUALS; None: the rule's own


class Acceptance(ABC):
    """A rule over distributions of V codes. `exact` returns p itself; relaxed rules move mass onto the code."""

    dials: ClassVar[frozenset[str] | None] = None  # the fields of `Dials` that it reads; None: any
    lossless: bool = False
    optimal: bool = False  # what is drawn after a refusal: the best correction, or the papers' own

    @classmethod
    @abstractmethod
    def build(cls, dials: Dials) -> Self:
        """The rule with these dials; InputError where one is missing or out of range."""

    @abstractmethod
    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """p [..., V] and a candidate [...] -> the distribution it is judged by, [..., V]; sums to 1.

        A p of one certain code comes back as it is: the format forces that code.
        """

    def at(self, level: int) -> Acceptance:
        """The rule for the children of nodes at `level` of a draft, the root's being 0."""
        return self

    def own(self, p: Tensor, q: Tensor) -> Tensor:
        """relax(p, y)(y) of every code y that q may offer, [B, V]; of other codes anything. p, q [B, V]."""
        own = p.clone()
        for codes in offered(q, p.numel()):  # [m]
            each = codes[:, None].expand(-1, len(p))
            own[:, codes] = (
                self.relax(p.expand(len(codes), -1, -1), each).gather(-1, each[..., None])[..., 0].T
            )
        return own

    def residual(self, p: Tensor, relaxed: Tensor, q: Tensor, code: Tensor) -> Tensor:
        """What is left to draw from once the candidate is refused, [..., V], normalised.

        The papers': [relaxed - q]+. The optimal one (arXiv 2601.09212, theorem on resampling) is what p has
        beyond the mass a(y) = min(q(y), relax(p, y)(y)) that acceptance lets out at y, [p - a]+. A rule
        that never lowers its candidate, as all that lend to it, has a >= min(p, q), so that is [p - q]+
        whatever the rule. It is optimal for one child. With several, what is drawn after a refusal is also
        what the next child is judged by: enumerated over random nodes of two and three children the optimal
        residual keeps a little more and is a little farther from p on average, and the papers' is within
        0.0002 of the least distance that its own acceptance leaves possible. Neither is always nearer. Where
        nothing is left (q covers the distribution) it is the relaxed distribution.
        p, relaxed and q [..., V], code [...].
        """
        left = ((p if self.optimal else relaxed) - q).clamp_(min=0)
        mass = left.sum(-1, keepdim=True)
        return (left / mass).where(mass > 0, relaxed)

    def law(self, p: Tensor, q: Tensor) -> Tensor:
        """The law of the code that judging one child drawn from q decides, [B, V]; p and q [B, V].

        What is accepted, a, and for every code that may be refused its share of q - a in its residual.
        """
        let_out = torch.minimum(q, self.own(p, q))
        law = let_out.clone()
        for codes in offered(q, p.numel()):
            each = codes[:, None].expand(-1, len(p))
            rows = p.expand(len(codes), -1, -1)
            left = self.residual(rows, self.relax(rows, each), q, each)  # [m, B, V]
            law += ((q - let_out)[:, codes].T[..., None] * left).sum(0)
        return law

    def beyond(self, p: Tensor, q: Tensor) -> Tensor:
        """The mass that acceptance lets out beyond p, sum [a - p]+, [B]; p and q [B, V]."""
        own = self.own(p, q.where(q > p, 0))  # where q <= p nothing can be
        return (torch.minimum(q, own) - p).clamp_(min=0).sum(-1)

    def spent(self, p: Tensor, q: Tensor) -> Tensor:
        """The total variation between p and the law of judging one child drawn from q, [B]; p and q [B, V].

        With the optimal residual it is `beyond`, the least that acceptance leaves possible.
        """
        if self.lossless:
            return torch.zeros_like(p[:, 0])
        if self.optimal:
            return self.beyond(p, q)
        return (self.law(p, q) - p).abs_().sum(-1) / 2


def offered(q: Tensor, each: int, most: int = 1 << 22) -> tuple[Tensor, ...]:
    """The codes that some row of q [B, V] may offer, in chunks of about `most` elements, `each` per code.

    On a CPU those with q > 0; elsewhere all, so that nothing is read back.
    """
    if q.device.type == "cpu":
        codes = (q > 0).any(0).nonzero()[:, 0]
    else:
        codes = torch.arange(q.shape[-1], device=q.device)
    return codes.split(max(1, most // each))


def optimal(residual: str | None, default: str) -> bool:
    """Whether a dial asks for the optimal residual; InputError where it names none."""
    if residual is not None and residual not in RESIDUALS:
        raise InputError(f"residual {residual!r} is unknown; known: {', '.join(RESIDUALS)}")
    return (residual or default) == "optimal"
