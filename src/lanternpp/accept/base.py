"""What `verify` asks of an acceptance rule: how it bends p in favour of a candidate."""

from __future__ import annotations

import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
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
    nu: float | None = None  # how fast a relaxation falls with the level of the draft
    residual: str | None = None  # one of RESIDUALS; None: the rule's own


class Acceptance(ABC):
    """A rule over distributions of V codes. `exact` returns p itself; relaxed rules move mass onto the code."""

    dials: ClassVar[frozenset[str] | None] = None  # the fields of `Dials` that it reads; None: any
    lossless: bool = False
    optimal_residual: bool = False  # what is drawn after a refusal: the best correction, or the papers' own
    paper_residual_is_optimal: bool = (
        False  # whether the papers' own correction ends as near to p as the best one does
    )

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

    def relax_with_draft(self, p: Tensor, q: Tensor, code: Tensor) -> Tensor:
        """The distribution that a candidate drawn from q is judged by, `relax` unless a rule needs q; p, q [..., V]."""
        return self.relax(p, code)

    def accept_mass(self, p: Tensor, q: Tensor) -> Tensor:
        """relax(p, y)(y) of every code y that q may offer, [..., V]; anything from q(y) on where that is no less."""
        mass = p.clone()
        for codes in candidate_codes(q, p.numel()):  # [m]
            each = broadcast_codes(codes, p)
            accepted = self.relax(p.expand(len(codes), *p.shape), each).gather(-1, each[..., None])
            mass[..., codes] = accepted[..., 0].movedim(0, -1)
        return mass

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
        left = ((p if self.optimal_residual else relaxed) - q).clamp_(min=0)
        mass = left.sum(-1, keepdim=True)
        return (left / mass).where(mass > 0, relaxed)

    def output_law(self, p: Tensor, q: Tensor) -> Tensor:
        """The law of the code that judging one child drawn from q decides, [..., V]; p and q [..., V].

        What is accepted, a, and for every code that may be refused its share of q - a in its residual. With the
        optimal residual that is what p has beyond a, in proportion. Where q is 0 it is p.
        """
        if self.lossless:
            return p
        out = torch.minimum(q, self.accept_mass(p, q))
        if self.optimal_residual:
            rest = (p - out).clamp_(min=0)
            share = (1 - out.sum(-1, keepdim=True)).clamp_(min=0) / rest.sum(-1, keepdim=True)
            return out.addcmul_(rest, share.where(share < float("inf"), 0))
        refused = q - out
        for codes in candidate_codes(q, p.numel()):
            each, rows = broadcast_codes(codes, p), p.expand(len(codes), *p.shape)
            left = self.residual(rows, self.relax_with_draft(rows, q, each), q, each)  # [m, ..., V]
            out += (refused[..., codes].movedim(-1, 0)[..., None] * left).sum(0)
        return out + p * (1 - q.sum(-1, keepdim=True)).clamp_(min=0)

    def output_laws(self, p: Tensor, q: Tensor, depth: Tensor, levels: int) -> Tensor:
        """`output_law` at every node of a draft, p and q [B, N, V], its depth [B, N] below `levels` where it has children."""
        if type(self).at is Acceptance.at:
            return self.output_law(p, q)
        laws = p
        for level in range(levels):
            laws = self.at(level).output_law(p, q).where((depth == level)[..., None], laws)
        return laws


def check_relax(rule: Acceptance, named: str, vocab: int, levels: int, like: Tensor) -> None:
    """InputError unless what a rule's `relax` returns are probabilities, tried on a few distributions of `vocab` codes."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(3, vocab, generator=generator).pow(8).to(like.device)
    p = p / p.sum(-1, keepdim=True)
    code = torch.stack((p[0].argmax(), p[1].argmin(), p[2].argmax()))
    for level in {0, max(levels - 1, 0)}:
        try:
            relaxed = rule.at(level).relax(p.clone(), code.clone())
            shape = tuple(relaxed.shape)
        except InputError:
            raise
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(line.filename).name}, line {line.lineno}"
            fault = f"fails on a distribution of {vocab} codes: {type(error).__name__}: {error} ({where})"
            raise InputError(f"relax of acceptance rule {named!r} {fault}") from error
        if shape != tuple(p.shape):
            fault = f"returns {list(shape)} for a p of {list(p.shape)}; return as many probabilities as there are codes"
            raise InputError(f"relax of acceptance rule {named!r} {fault}")
        sums = relaxed.sum(-1)
        if not bool((relaxed >= -1e-6).all()) or not bool(((sums - 1).abs() < 1e-3).all()):
            raise InputError(
                f"relax of acceptance rule {named!r} returns numbers that are no probabilities (the least is "
                f"{float(relaxed.min()):.3g}, their sums are {', '.join(f'{one:.3g}' for one in sums.tolist())}); each must "
                "be 0 or more, and they must sum to 1"
            )


class DecayingAcceptance(Acceptance):
    """A rule whose relaxation falls with the level of the draft, by a factor exp(-nu level)."""

    nu: float = 0.0
    _level: int | Tensor = 0

    def at(self, level: int) -> Self:
        """The rule at a level; itself at the first one, and where nothing falls."""
        return self._at(level) if level else self

    def output_laws(self, p: Tensor, q: Tensor, depth: Tensor, levels: int) -> Tensor:
        """All levels at once."""
        return self._at(depth).output_law(p, q)

    def decay_factor(self, like: Tensor) -> Tensor | float:
        """The factor at this rule's level, to be multiplied with a tensor [..., V]."""
        if isinstance(self._level, Tensor):
            return (-self.nu * self._level.double()).exp().to(like.dtype)[..., None]
        return math.exp(-self.nu * self._level)

    def _at(self, level: int | Tensor) -> Self:
        if not self.nu:
            return self
        made = copy(self)
        made._level = level
        return made


def has_fast_law(rule: Acceptance | type[Acceptance]) -> bool:
    """Whether a rule's law at every level of a draft is little work: it then asks for no code one by one."""
    kind = rule if isinstance(rule, type) else type(rule)
    optimal = rule.optimal_residual or (isinstance(rule, type) and "residual" in (rule.dials or ()))
    return rule.lossless or (optimal and kind.accept_mass is not Acceptance.accept_mass)


def broadcast_codes(codes: Tensor, p: Tensor) -> Tensor:
    """codes [m] for every row of p [..., V], [m, ...]."""
    return codes.view(-1, *[1] * (p.dim() - 1)).expand(-1, *p.shape[:-1])


def candidate_codes(q: Tensor, each: int, most: int = 1 << 22) -> tuple[Tensor, ...]:
    """The codes that some row of q [..., V] may offer, in chunks of about `most` elements, `each` per code.

    On a CPU those with q > 0; elsewhere all, so that nothing is read back.
    """
    if q.device.type == "cpu":
        codes = (q > 0).flatten(0, -2).any(0).nonzero()[:, 0]
    else:
        codes = torch.arange(q.shape[-1], device=q.device)
    return codes.split(max(1, most // each))


def check_nu(nu: float | None) -> float:
    """How fast a relaxation falls with the level; InputError where it would rise."""
    if nu is not None and not 0 <= nu < math.inf:
        raise InputError(f"nu {nu} is negative or infinite; use 0 (the same at every level) or more")
    return nu or 0.0


def wants_optimal(residual: str | None, default: str) -> bool:
    """Whether a dial asks for the optimal residual; InputError where it names none."""
    if residual is not None and residual not in RESIDUALS:
        raise InputError(f"residual {residual!r} is unknown; known: {', '.join(RESIDUALS)}")
    return (residual or default) == "optimal"
