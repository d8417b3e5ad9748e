"""Acceptance rules: the base class that `engine/verify/` calls.

A rule replaces the target's distribution p by a relaxed one in which the drafted code, the candidate, is more probable. The
cost is the total variation between p and `output_distribution`, that of the decided code. The candidate was drawn from q.
"""

from __future__ import annotations

import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp import types
from lanternpp.errors import InputError
from lanternpp.types import NeighbourBudget, on_host

RESIDUALS = ("paper", "optimal")
MAX_ENUMERATED = 1024  # codes whose cost is computed code by code, for a rule without an `accept_mass`
NUM_SAMPLES = 64  # codes that are sampled to estimate the cost over more codes
CHUNK = 1 << 22  # probabilities that are relaxed at once, about


class Dials(types.Dials):
    """The dials that a rule may be built from, by name, and `table`: k -> the k nearest codes of every code, [V, k] int32."""

    def __init__(self, table: Callable[[int], Tensor], **dials: Any):
        super().__init__(table=table, **dials)


class Acceptance(ABC):
    """A rule over distributions of V codes. `exact` leaves p as it is; a relaxed rule adds probability to the candidate."""

    dials: ClassVar[frozenset[str] | None] = None  # the fields of `Dials` that the rule reads; None: any
    lossless: bool = False
    trajectories: bool = False  # whether the rule is for latents of diffusion heads alone
    optimal_residual: bool = False  # after a rejection: [p - a]+ instead of the papers' [relaxed - q]+
    sliders: ClassVar[dict[str, tuple[float, float]]] = {}  # the rule's own ranges of dials on the page
    # Of a relaxed rule: the dial that `tune` and `bench --equal-tv` search, its value that is exact, and the most relaxed one tried.
    strength: ClassVar[tuple[str, float, float] | None] = None
    paper_residual_is_optimal: bool = False  # whether the papers' residual costs no more than the optimal one

    def __init_subclass__(cls, **kwargs: Any):
        """Reset `accept_mass` and `paper_residual_is_optimal` of a class that overrides the `relax` that they are made for."""
        super().__init_subclass__(**kwargs)
        if {"relax", "relax_with_draft"} & vars(cls).keys():
            for name in {"accept_mass", "paper_residual_is_optimal"} - vars(cls).keys():
                setattr(cls, name, getattr(Acceptance, name))

    @classmethod
    @abstractmethod
    def build(cls, dials: Dials) -> Self:
        """Build the rule from these dials; raise InputError where a dial is missing or out of range."""

    @abstractmethod
    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        """Return the relaxed distribution [..., V] that verifies a candidate [...], for p [..., V]; its sum is 1.

        A p with probability 1 at a code is returned unchanged: the format forces that code.
        """

    def at(self, level: int) -> Acceptance:
        """Return the rule for the children of nodes at `level` of a draft; the root's level is 0."""
        return self

    def as_numbers(self, levels: int) -> NeighbourBudget | None:
        """Return the rule as numbers, for kernels, for drafts of `levels` levels; None where numbers cannot describe the rule."""
        return None

    def relax_with_draft(self, p: Tensor, q: Tensor, code: Tensor) -> Tensor:
        """Return the relaxed distribution for a candidate drawn from q: `relax`, unless a rule needs q; p, q [..., V]."""
        return self.relax(p, code)

    def accept_mass(self, p: Tensor, q: Tensor) -> Tensor:
        """Return the mass relax_with_draft(p, q, y)(y) of each code y as the candidate, [..., V]; p, q [..., V].

        Verification accepts min(q(y), mass). So where the mass is not below q(y) > 0, it may be any value of at least q(y).
        """
        mass = p.clone()
        for codes, candidates, relaxed in self._candidates(p, q):
            mass[..., codes] = relaxed.gather(-1, candidates[..., None])[..., 0].movedim(0, -1)
        return mass

    def residual(self, p: Tensor, relaxed: Tensor, q: Tensor, code: Tensor) -> Tensor:
        """Return the distribution to draw from once the candidate is rejected, [..., V], normalised.

        The papers' residual is [relaxed - q]+. The optimal one (arXiv 2601.09212, theorem on resampling) is
        [p - a]+, where a(y) = min(q(y), relax(p, y)(y)) is the mass accepted at y. A rule that never lowers the
        candidate's probability has a >= min(p, q), so that its optimal residual is [p - q]+. Where the residual is zero
        everywhere, return the relaxed distribution.

        "Optimal" is proven for one child. With several, the next child is verified against the residual. Enumerated over
        random nodes of two and three children, the optimal residual accepts a little more and is a little farther from
        p on average; the papers' residual is within 0.0002 of the least distance possible for its acceptance. Neither
        residual is always nearer. p, relaxed and q [..., V], code [...].
        """
        residual = ((p if self.optimal_residual else relaxed) - q).clamp_(min=0)
        mass = residual.sum(-1, keepdim=True)
        return (residual / mass).where(mass > 0, relaxed)

    def output_distribution(self, p: Tensor, q: Tensor) -> Tensor:
        """Return the distribution of the code that verifying one child drawn from q yields, [..., V]; p and q [..., V].

        The distribution is the accepted mass a, plus the rejected mass q - a of every code, spread as that code's residual.
        With the optimal residual the second part is [p - a]+, scaled. Where q is 0 everywhere, the distribution is p.
        """
        if self.lossless:
            return p
        output = torch.minimum(q, self.accept_mass(p, q))  # a
        if self.optimal_residual:
            residual = (p - output).clamp_(min=0)
            scale = (1 - output.sum(-1, keepdim=True)).clamp_(min=0) / residual.sum(-1, keepdim=True)
            return output.addcmul_(residual, scale.where(scale < float("inf"), 0))
        rejected = q - output
        for codes, candidates, relaxed in self._candidates(p, q):
            residual = self.residual(p.expand_as(relaxed), relaxed, q, candidates)  # [m, ..., V]
            output += (rejected[..., codes].movedim(-1, 0)[..., None] * residual).sum(0)
        # q has no mass for forbidden codes: a forbidden candidate leaves p unchanged, and is rejected.
        residual = self.residual(p, p, q, q.argmax(-1))
        return output + residual * (1 - q.sum(-1, keepdim=True)).clamp_(min=0)

    def output_distributions(self, p: Tensor, q: Tensor, depth: Tensor, levels: int) -> Tensor:
        """Return `output_distribution` at every node of a draft; p, q [B, N, V], depth [B, N], below `levels` for parents."""
        if type(self).at is Acceptance.at:
            return self.output_distribution(p, q)
        output = p
        for level in range(levels):
            output = self.at(level).output_distribution(p, q).where((depth == level)[..., None], output)
        return output

    def _candidates(self, p: Tensor, q: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the codes that may be drafted under q [..., V] in chunks: codes [m], the codes repeated for every row [m, ...],
        and the relaxed distributions that verify them [m, ..., V].

        On a CPU the codes with q > 0 in any row; on other devices all codes, which needs no transfer to the host.
        """
        if on_host(q):
            draftable = (q > 0).reshape(-1, q.shape[-1]).any(0).nonzero()[:, 0]
        else:
            draftable = torch.arange(q.shape[-1], device=q.device)
        for codes in draftable.split(max(1, CHUNK // p.numel())):
            candidates = codes.view(-1, *[1] * (p.dim() - 1)).expand(-1, *p.shape[:-1])
            shape = len(codes), *p.shape
            yield codes, candidates, self.relax_with_draft(p.expand(shape), q.expand(shape), candidates)


def check_relax(rule: Acceptance, rule_name: str, vocab: int, levels: int, like: Tensor) -> None:
    """Check that a rule's `relax`, or its own `relax_with_draft`, returns probabilities for a few distributions of `vocab` codes,
    including zeros as top-k leaves them, and p itself where a code is forced; raise InputError if not.
    """
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(3, vocab, generator=generator).pow(8).to(like.device)
    code = torch.stack((p[0].argmax(), p[1].argmin(), p[2].argmax()))
    forced = F.one_hot(code, vocab).to(p.dtype)
    p = torch.cat((p, p.where(p >= p.median(-1, keepdim=True).values, 0), forced))
    p, code = p / p.sum(-1, keepdim=True), code.repeat(3)
    q = torch.cat((torch.full_like(p[:6], 1 / vocab), forced))
    reads_q = type(rule).relax_with_draft is not Acceptance.relax_with_draft
    subject = f"{'relax_with_draft' if reads_q else 'relax'} of acceptance rule {rule_name!r}"
    for level in {0, max(levels - 1, 0)}:
        try:
            relaxed = rule.at(level).relax_with_draft(p.clone(), q.clone(), code.clone())
            shape = list(relaxed.shape)
        except InputError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise InputError(
                f"{subject} fails on a distribution of {vocab} codes: {type(error).__name__}: {error} "
                f"({Path(frame.filename).name}, line {frame.lineno})"
            ) from error
        if shape != list(p.shape):
            raise InputError(
                f"{subject} returns {shape} for a p of {list(p.shape)}; return as many probabilities as there are codes"
            )
        sums = relaxed.sum(-1)
        if not bool((relaxed >= -1e-6).all()) or not bool(((sums - 1).abs() < 1e-3).all()):
            listed_sums = ", ".join(f"{total:.3g}" for total in sums.tolist())
            raise InputError(
                f"{subject} returns numbers that are no probabilities (the least is {float(relaxed.min()):.3g}, their "
                f"sums are {listed_sums}); each must be 0 or more, and they must sum to 1"
            )
        if (relaxed - p)[6:].abs().max() > 1e-3:
            raise InputError(
                f"{subject} changes a distribution whose candidate has probability 1, which the format forces; return it unchanged"
            )


class DecayingAcceptance(Acceptance):
    """A rule whose relaxation decays with the level i of the draft, by a factor exp(-nu i)."""

    required: ClassVar[tuple[str, ...]] = ("delta",)  # dials without a default
    requirements: ClassVar[str] = "delta"  # the required dials, for the message
    default_residual: ClassVar[str] = "optimal"
    nu: float = 0.0
    _level: int | Tensor = 0

    def __init__(self, nu: float = 0.0, residual: str | None = None):
        """residual: None is `default_residual`. Raise InputError where it is unknown, or nu is negative or infinite."""
        if not 0 <= nu < math.inf:
            raise InputError(f"nu {nu} is negative or infinite; use 0 (the same at every level) or more")
        if residual is not None and residual not in RESIDUALS:
            raise InputError(f"residual {residual!r} is unknown; known: {', '.join(RESIDUALS)}")
        self.nu, self.optimal_residual = nu, (residual or self.default_residual) == "optimal"

    @classmethod
    def build(cls, dials: Dials) -> Self:
        """Build the rule from the dials that it reads; raise InputError where a required dial is missing."""
        if any(getattr(dials, name) is None for name in cls.required):
            raise InputError(f"this rule needs {cls.requirements}")
        arguments = {name: getattr(dials, name) for name in cls.dials or ()}
        if "neighbours" in arguments:
            arguments["table"] = dials.table(arguments.pop("neighbours"))
        return cls(**{name: value for name, value in arguments.items() if value is not None})

    def at(self, level: int | Tensor) -> Self:
        """Return the rule at a level, or for rows of p at the level [...] of each row; the rule itself where nu is 0."""
        if not self.nu:
            return self
        rule = copy(self)
        rule._level = level
        return rule

    def output_distributions(self, p: Tensor, q: Tensor, depth: Tensor, levels: int) -> Tensor:
        """Compute `output_distribution` of all levels at once, where `at` is not overridden."""
        if type(self).at is not DecayingAcceptance.at:
            return super().output_distributions(p, q, depth, levels)
        return self.at(depth).output_distribution(p, q)

    def decay_factor(self, like: Tensor) -> Tensor | float:
        """Return exp(-nu i) for this rule's level i; a tensor [..., 1] of the dtype of `like` where rows have their own levels."""
        if isinstance(self._level, Tensor):
            return (-self.nu * self._level.double()).exp().to(like.dtype)[..., None]
        return math.exp(-self.nu * self._level)


def has_fast_distribution(rule: Acceptance | type[Acceptance]) -> bool:
    """Return whether a rule, or a class with one of its residuals, has an `output_distribution` without a `relax` of every code."""
    rule_class = rule if isinstance(rule, type) else type(rule)
    optimal = rule.optimal_residual or (isinstance(rule, type) and "residual" in (rule.dials or ()))
    return rule.lossless or (optimal and rule_class.accept_mass is not Acceptance.accept_mass)


def tv_cost(rule: Acceptance, p: Tensor, q: Tensor) -> Tensor:
    """Return the total variation between p and `output_distribution` for one child drawn from q, [...]; p and q [..., V].

    With the optimal residual the total variation is `excess`, the least possible for the same acceptance. For a rule that
    defines neither `accept_mass` nor `output_distribution`, over more than `MAX_ENUMERATED` codes, return an estimate of
    `excess` with either residual: the exact value would call `relax_with_draft` for each of V codes.
    """
    if rule.lossless:
        return torch.zeros_like(p[..., 0])
    if type(rule).output_distribution is Acceptance.output_distribution:
        if type(rule).accept_mass is Acceptance.accept_mass and p.shape[-1] > MAX_ENUMERATED:
            return _sampled_excess(rule, p, q)
        if rule.optimal_residual or rule.paper_residual_is_optimal:
            return excess(rule, p, q)
    return (rule.output_distribution(p, q) - p).abs_().sum(-1) / 2


def excess(rule: Acceptance, p: Tensor, q: Tensor) -> Tensor:
    """Return the accepted mass above p, sum [a - p]+ with a = min(q, accept_mass), [...]; p and q [..., V]."""
    if type(rule).relax_with_draft is Acceptance.relax_with_draft:
        mass = rule.accept_mass(p, q.where(q > p, 0))  # where q <= p there is no excess
    else:
        mass = rule.accept_mass(p, q)
    return (torch.minimum(q, mass) - p).clamp_(min=0).sum(-1)


def _sampled_excess(rule: Acceptance, p: Tensor, q: Tensor) -> Tensor:
    """Estimate `excess` from m = `NUM_SAMPLES` codes, spread evenly over the mass [q - p]+, its upper bound, [B].

    A code y contributes a share [min(q, accept_mass) - p]+ / [q - p]+ of its mass (stratified sampling at fixed
    points). Where codes are in no order, the standard error is at most 0.5 / sqrt(m) of the mass.
    """
    bound = (q - p).clamp(min=0)
    cdf = bound.cumsum(-1, dtype=torch.float64)
    quantiles = (torch.arange(NUM_SAMPLES, device=p.device) + 0.5) / NUM_SAMPLES
    codes = torch.searchsorted(cdf, (quantiles * cdf[:, -1:]).contiguous(), right=True)
    codes = codes.clamp_(max=p.shape[-1] - 1)  # [B, m]
    shape = NUM_SAMPLES, -1, -1
    relaxed = rule.relax_with_draft(p.expand(shape), q.expand(shape), codes.T)  # [m, B, V]
    mass = relaxed.gather(-1, codes.T[..., None])[..., 0].T  # [B, m]
    code_excess = (torch.minimum(q.gather(1, codes), mass) - p.gather(1, codes)).clamp_(min=0)
    share = code_excess / bound.gather(1, codes).clamp_(min=torch.finfo(p.dtype).tiny)
    return share.mean(1) * cdf[:, -1].to(p.dtype)
