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
from lanternpp.types import Draft, Verdict

Verifier = Callable[[Draft, Tensor, Sampling, Acceptance, Noise, bool], Verdict]
TOKEN, BLOCK, TRAVERSAL = "token", "block", "traversal"
VERIFIERS: dict[str, Verifier] = {TOKEN: verify_tokenwise, BLOCK: verify_joint, TRAVERSAL: verify_joint}


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
