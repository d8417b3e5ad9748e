"""Acceptance rules: the base class that `engine/verify/` calls.

A rule replaces the target's distribution p by a relaxed one in which the drafted code, the candidate, is more probable. Its cost
is the total variation between p and `output_distribution`, the distribution of the code decided.
"""

from __future__ import annotations

import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from copy import copy
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp import types
from lanternpp.errors import InputError
from lanternpp.types import NeighbourBudget, on_host

RESIDUALS = ("paper", "optimal")
ENUMERATED = 1024  # codes up to which the cost of a rule without an `accept_mass` is computed code by code
SAMPLED = 64  # codes that are sampled where there are more
CHUNK = 1 << 22  # numbers of the distributions that are relaxed at once, about


class Dials(types.Dials):
    """What a rule may be built from: the dials by name, and `table`: k -> the k nearest codes of every code, [V, k] int32."""

    def __init__(self, table: Callable[[int], Tensor], **dials: Any):
        super().__init__(table=table, **dials)


class Acceptance(ABC):
    """A rule over distributions of V codes. `exact` leaves p as it is; a relaxed rule adds probability to the candidate."""

    dials: ClassVar[frozenset[str] | None] = None  # the fields of `Dials` that it reads; None: any
    lossless: bool = False
    trajectories: bool = False  # whether it is for latents of diffusion heads alone
    optimal_residual: bool = False  # after a rejection: [p - a]+ instead of the papers' [relaxed - q]+
    sliders: ClassVar[dict[str, tuple[float, float]]] = {}  # ends of dials on the page, if they are its own
    paper_residual_is_optimal: bool = False  # whether the papers' residual costs no more than the optimal one

    def __init_subclass__(cls, **given: Any):
        """A class that overrides `relax` does not inherit what a class above computes of the `relax` that it defines itself."""
        super().__init_subclass__(**given)
        if {"relax", "relax_with_draft"} & vars(cls).keys():
            for name in {"accept_mass", "paper_residual_is_optimal"} - vars(cls).keys():
                owner = next(kind for kind in cls.__mro__ if name in vars(kind))
                relax = vars(owner).get("relax")
                if relax is not None and not getattr(relax, "__isabstractmethod__", False):
                    setattr(cls, name, getattr(Acceptance, name))

    @classmethod
    @abstractmethod
    def build(cls, dials: Dials) -> Self:
        """The rule with these dials; InputError where one is missing or out of range."""

    @abstractmethod
    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """p [..., V] and a candidate [...] -> the relaxed distribution that verifies it, [..., V]; sums to 1.

        Where p has probability 1 at one code it is returned unchanged: the format forces that code.
        """

    def at(self, level: int) -> Acceptance:
        """The rule for the children of nodes at `level` of a draft, the root's being 0."""
        return self

    def as_numbers(self, levels: int) -> NeighbourBudget | None:
        """The rule as numbers, for kernels and drafts of so many levels; None where it is another function."""
        return None

    def relax_with_draft(self, p: Tensor, q: Tensor, code: Tensor) -> Tensor:
        """The relaxed distribution for a candidate drawn from q: `relax`, unless a rule needs q; p, q [..., V]."""
        return self.relax(p, code)

    def accept_mass(self, p: Tensor, q: Tensor) -> Tensor:
        """The probability relax_with_draft(p, q, y)(y) that each code y is accepted with, [..., V]; p, q [..., V].

        Exact where it is below q(y) > 0. Elsewhere any value of at least q(y) will do, as callers take min(q, .).
        """
        mass = p.clone()
        for codes, each, relaxed in self._candidates(p, q):
            mass[..., codes] = relaxed.gather(-1, each[..., None])[..., 0].movedim(0, -1)
        return mass

    def residual(self, p: Tensor, relaxed: Tensor, q: Tensor, code: Tensor) -> Tensor:
        """The distribution to draw from once the candidate is rejected, [..., V], normalised.

        The papers' residual is [relaxed - q]+. The optimal one (arXiv 2601.09212, theorem on resampling) is
        [p - a]+, where a(y) = min(q(y), relax(p, y)(y)) is the mass accepted at y. A rule that never lowers the
        candidate's probability has a >= min(p, q), so that its optimal residual is [p - q]+. Where the residual is zero
        everywhere the relaxed distribution is returned.

        "Optimal" is proven for one child. With several, the next child is verified against the residual. Enumerated over
        random nodes of two and three children, the optimal residual accepts a little more and is a little farther from
        p on average; the papers' is within 0.0002 of the least distance possible for its acceptance. Neither is always
        nearer.
        p, relaxed and q [..., V], code [...].
        """
        left = ((p if self.optimal_residual else relaxed) - q).clamp_(min=0)
        mass = left.sum(-1, keepdim=True)
        return (left / mass).where(mass > 0, relaxed)

    def output_distribution(self, p: Tensor, q: Tensor) -> Tensor:
        """The distribution of the code that verifying one child drawn from q yields, [..., V]; p and q [..., V].

        It is the accepted mass a, plus the rejected mass q - a of every code, spread as that code's residual. With the
        optimal residual the second part is [p - a]+, scaled. Where q is 0 everywhere it is p.
        """
        if self.lossless:
            return p
        out = torch.minimum(q, self.accept_mass(p, q))
        if self.optimal_residual:
            rest = (p - out).clamp_(min=0)
            share = (1 - out.sum(-1, keepdim=True)).clamp_(min=0) / rest.sum(-1, keepdim=True)
            return out.addcmul_(rest, share.where(share < float("inf"), 0))
        rejected = q - out
        for codes, each, relaxed in self._candidates(p, q):
            left = self.residual(p.expand_as(relaxed), relaxed, q, each)  # [m, ..., V]
            out += (rejected[..., codes].movedim(-1, 0)[..., None] * left).sum(0)
        # q has no mass for forbidden codes: such a candidate leaves p as it is, and is rejected
        left = self.residual(p, p, q, q.argmax(-1))
        return out + left * (1 - q.sum(-1, keepdim=True)).clamp_(min=0)

    def output_distributions(self, p: Tensor, q: Tensor, depth: Tensor, levels: int) -> Tensor:
        """`output_distribution` at every node of a draft, p and q [B, N, V], its depth [B, N] below `levels` where it has children."""
        if type(self).at is Acceptance.at:
            return self.output_distribution(p, q)
        output = p
        for level in range(levels):
            output = self.at(level).output_distribution(p, q).where((depth == level)[..., None], output)
        return output

    def _candidates(self, p: Tensor, q: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The codes that may be drafted under q [..., V], a chunk at a time: codes [m], the same for every row [m, ...], and the
        relaxed distributions that verify them [m, ..., V].

        On a CPU the codes with q > 0 in some row; on other devices all codes, which needs no transfer to the host.
        """
        if on_host(q):
            drafted = (q > 0).flatten(0, -2).any(0).nonzero()[:, 0]
        else:
            drafted = torch.arange(q.shape[-1], device=q.device)
        for codes in drafted.split(max(1, CHUNK // p.numel())):
            each = codes.view(-1, *[1] * (p.dim() - 1)).expand(-1, *p.shape[:-1])
            shape = len(codes), *p.shape
            yield codes, each, self.relax_with_draft(p.expand(shape), q.expand(shape), each)


def check_relax(rule: Acceptance, named: str, vocab: int, levels: int, like: Tensor) -> None:
    """InputError unless a rule's `relax`, and a `relax_with_draft` of its own, return probabilities for a few distributions of
    `vocab` codes, some with zeros, as top-k leaves them, and p itself where a code is forced.
    """
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(3, vocab, generator=generator).pow(8).to(like.device)
    code = torch.stack((p[0].argmax(), p[1].argmin(), p[2].argmax()))
    forced = F.one_hot(code, vocab).to(p.dtype)
    p = torch.cat((p, p.where(p >= p.median(-1, keepdim=True).values, 0), forced))
    p, code = p / p.sum(-1, keepdim=True), code.repeat(3)
    q = torch.cat((torch.full_like(p[:6], 1 / vocab), forced))
    tried: dict[str, tuple[Tensor, ...]] = {"relax": (p, code)}
    if type(rule).relax_with_draft is not Acceptance.relax_with_draft:
        tried["relax_with_draft"] = p, q, code
    for level, name in product({0, max(levels - 1, 0)}, tried):
        try:
            relaxed = getattr(rule.at(level), name)(*(x.clone() for x in tried[name]))
            shape = tuple(relaxed.shape)
        except InputError:
            raise
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(line.filename).name}, line {line.lineno}"
            fault = f"fails on a distribution of {vocab} codes: {type(error).__name__}: {error} ({where})"
            raise InputError(f"{name} of acceptance rule {named!r} {fault}") from error
        if shape != tuple(p.shape):
            fault = f"returns {list(shape)} for a p of {list(p.shape)}; return as many probabilities as there are codes"
            raise InputError(f"{name} of acceptance rule {named!r} {fault}")
        sums = relaxed.sum(-1)
        if not bool((relaxed >= -1e-6).all()) or not bool(((sums - 1).abs() < 1e-3).all()):
            raise InputError(
                f"{name} of acceptance rule {named!r} returns numbers that are no probabilities (the least is "
                f"{float(relaxed.min()):.3g}, their sums are {', '.join(f'{one:.3g}' for one in sums.tolist())}); each must "
                "be 0 or more, and they must sum to 1"
            )
        if (relaxed - p)[6:].abs().max() > 1e-3:
            raise InputError(
                f"{name} of acceptance rule {named!r} changes a distribution whose candidate has probability 1, which the format "
                "forces; return it unchanged"
            )


class DecayingAcceptance(Acceptance):
    """A rule whose relaxation decays with the level i of the draft, by a factor exp(-nu i)."""

    required: ClassVar[tuple[str, ...]] = ("delta",)  # dials without a default
    missing: ClassVar[str] = "delta"  # what the rule needs, for the message
    usual_residual: ClassVar[str] = "optimal"
    nu: float = 0.0
    _level: int | Tensor = 0

    def __init__(self, nu: float = 0.0, residual: str | None = None):
        """residual: None is the usual one. InputError where it is unknown, or nu is negative or infinite."""
        if not 0 <= nu < math.inf:
            raise InputError(f"nu {nu} is negative or infinite; use 0 (the same at every level) or more")
        if residual is not None and residual not in RESIDUALS:
            raise InputError(f"residual {residual!r} is unknown; known: {', '.join(RESIDUALS)}")
        self.nu, self.optimal_residual = nu, (residual or self.usual_residual) == "optimal"

    @classmethod
    def build(cls, dials: Dials) -> Self:
        """From the dials that it reads; InputError where a required one is missing."""
        if any(getattr(dials, name) is None for name in cls.required):
            raise InputError(f"this rule needs {cls.missing}")
        given = {name: getattr(dials, name) for name in cls.dials or ()}
        if "neighbours" in given:
            given["table"] = dials.table(given.pop("neighbours"))
        return cls(**{name: value for name, value in given.items() if value is not None})

    def at(self, level: int | Tensor) -> Self:
        """The rule at a level, or at the level of every row [...] of what it is given; itself where nu is 0."""
        if not self.nu:
            return self
        made = copy(self)
        made._level = level
        return made

    def output_distributions(self, p: Tensor, q: Tensor, depth: Tensor, levels: int) -> Tensor:
        """`output_distribution` of all levels in one computation, where `at` is not overridden."""
        if type(self).at is not DecayingAcceptance.at:
            return super().output_distributions(p, q, depth, levels)
        return self.at(depth).output_distribution(p, q)

    def decay_factor(self, like: Tensor) -> Tensor | float:
        """The factor at this rule's level, to be multiplied with a tensor [..., V]."""
        if isinstance(self._level, Tensor):
            return (-self.nu * self._level.double()).exp().to(like.dtype)[..., None]
        return math.exp(-self.nu * self._level)


def has_fast_distribution(rule: Acceptance | type[Acceptance]) -> bool:
    """Whether `output_distribution` of a rule is fast, because it does not call `relax` for every code."""
    kind = rule if isinstance(rule, type) else type(rule)
    optimal = rule.optimal_residual or (isinstance(rule, type) and "residual" in (rule.dials or ()))
    return rule.lossless or (optimal and kind.accept_mass is not Acceptance.accept_mass)


def tv_cost(rule: Acceptance, p: Tensor, q: Tensor) -> Tensor:
    """The total variation between p and `output_distribution` for one child drawn from q, [...]; p and q [..., V].

    With the optimal residual it is `excess`, the least possible for the same acceptance. Of a rule that defines neither
    `accept_mass` nor `output_distribution`, over more than `ENUMERATED` codes, it is an estimate of that least with either residual: the exact
    value would call `relax_with_draft` for each of V codes.
    """
    if rule.lossless:
        return torch.zeros_like(p[..., 0])
    if type(rule).output_distribution is Acceptance.output_distribution:
        if type(rule).accept_mass is Acceptance.accept_mass and p.shape[-1] > ENUMERATED:
            return _sampled(rule, p, q)
        if rule.optimal_residual or rule.paper_residual_is_optimal:
            return excess(rule, p, q)
    return (rule.output_distribution(p, q) - p).abs_().sum(-1) / 2


def excess(rule: Acceptance, p: Tensor, q: Tensor) -> Tensor:
    """The accepted mass above p, sum [a - p]+ with a = min(q, accept_mass), [...]; p and q [..., V]."""
    if type(rule).relax_with_draft is Acceptance.relax_with_draft:
        mass = rule.accept_mass(p, q.where(q > p, 0))  # where q <= p there is no excess
    else:
        mass = rule.accept_mass(p, q)
    return (torch.minimum(q, mass) - p).clamp_(min=0).sum(-1)


def _sampled(rule: Acceptance, p: Tensor, q: Tensor) -> Tensor:
    """`excess` from `SAMPLED` codes, spread evenly over the mass [q - p]+, its upper bound, [B].

    A code y contributes a share [min(q, accept_mass) - p]+ / [q - p]+ of its mass (stratified sampling at fixed
    points), and the mean has at most 0.5 / sqrt(SAMPLED) of the mass as its error.
    """
    most = (q - p).clamp(min=0)
    total = most.cumsum(-1, dtype=torch.float64)
    places = (torch.arange(SAMPLED, device=p.device) + 0.5) / SAMPLED
    codes = torch.searchsorted(total, (places * total[:, -1:]).contiguous(), right=True)
    codes = codes.clamp_(max=p.shape[-1] - 1).T  # [m, B]
    shape = SAMPLED, -1, -1
    mass = (
        rule.relax_with_draft(p.expand(shape), q.expand(shape), codes).gather(-1, codes[..., None])[..., 0].T
    )
    at = codes.T
    let_out = torch.minimum(q.gather(1, at), mass) - p.gather(1, at)
    share = let_out.clamp_(min=0) / most.gather(1, at).clamp_(min=torch.finfo(p.dtype).tiny)
    return share.mean(1) * total[:, -1].to(p.dtype)
