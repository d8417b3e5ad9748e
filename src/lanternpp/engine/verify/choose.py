"""The ways to verify a draft, by the names of `--verify`, and which drafts each supports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lanternpp.accept.base import Acceptance, has_fast_distribution
from lanternpp.engine.noise import Noise
from lanternpp.engine.proposer import DraftSampling
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.joint import verify_joint
from lanternpp.engine.verify.tokenwise import verify_tokenwise
from lanternpp.nn.backend import Backend
from lanternpp.types import Draft, Verdict, on_host

Verifier = Callable[[Draft, Tensor, Sampling, Acceptance, Noise, bool], Verdict]
TOKEN, BLOCK, TRAVERSAL = "token", "block", "traversal"
VERIFIERS: dict[str, Verifier] = {TOKEN: verify_tokenwise, BLOCK: verify_joint, TRAVERSAL: verify_joint}


def with_native(verifier: Verifier, backend: Backend) -> Verifier:
    """Return a verifier that leaves the drafts, rules and tensors that a backend supports to the backend."""
    if type(backend).verify is Backend.verify or verifier not in VERIFIERS.values():
        return verifier

    def verify(
        draft: Draft,
        logits: Tensor,
        sampling: Sampling,
        rule: Acceptance,
        noise: Noise,
        measure_tv: bool = False,
    ) -> Verdict:
        tokenwise, widths = verifier is verify_tokenwise, draft.tree.widths
        budget = None
        if on_host(logits) and not measure_tv and not sampling.greedy:
            budget = rule.as_numbers(len(widths))
        if budget is not None and (tokenwise or rule.lossless or budget.optimal):
            shape = (len(widths), max(widths, default=0)) if tokenwise else (1,)
            u, u_bonus = noise.fine(Noise.ACCEPT, *shape), noise.fine(Noise.BONUS, 1)
            verdict = backend.verify(draft, logits, sampling.warp, budget, u, u_bonus)
            if verdict is not None:
                return verdict
        return verifier(draft, logits, sampling, rule, noise, measure_tv)

    return verify


@dataclass(frozen=True)
class DraftTraits:
    """The properties of drafts and sampling that decide which verifiers support them."""

    drafting: DraftSampling
    rule: Acceptance | type[Acceptance]
    greedy: bool
    residual: str | None  # as given by the user


def best_for(drafts: DraftTraits) -> str:
    """Return the verifier that accepts most codes for the same output distribution.

    This is block on a chain, if the rule's output distribution is fast, and traversal on a tree, if the rule is lossless: a
    relaxed rule has another output distribution token by token, where it relaxes again for every sibling.
    """
    if has_fast_distribution(drafts.rule) and unsupported_reason(drafts, BLOCK) is None:
        return BLOCK
    return TRAVERSAL if drafts.rule.lossless and unsupported_reason(drafts, TRAVERSAL) is None else TOKEN


def unsupported_reason(drafts: DraftTraits, name: str) -> str | None:
    """Return why a verifier does not support these drafts, in a sentence; None where it does."""
    if name == TOKEN:
        return None
    remedy, drafting = f"use verify {TOKEN}", drafts.drafting
    if drafts.greedy:
        reason = "at temperature 0 every verifier keeps the same codes"
    elif not drafting.samples_from_q:
        reason = (
            f"the proposer {drafting.reason}, and every draft code must follow the distribution that it is "
            "offered with"
        )
    elif drafts.residual == "paper":
        reason = "the papers' residual is of token-wise verification"
        remedy += ", or residual optimal"
    elif name == BLOCK and not drafting.chain:
        reason = "the tree branches"
        if unsupported_reason(drafts, TRAVERSAL) is None:
            remedy = f"use verify {TRAVERSAL} or {TOKEN}"
    elif name == TRAVERSAL and not drafting.chain and not drafting.fixed:
        reason = "the shape of the tree is decided while it is drawn"
    else:
        return None
    return f"verify {name} is not available here, as {reason}; {remedy}"
