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
    """A verifier that leaves to a backend the drafts, rules and tensors that it supports."""
    if type(backend).verify is Backend.verify or verifier not in VERIFIERS.values():
        return verifier

    def either(
        draft: Draft,
        logits: Tensor,
        sampling: Sampling,
        rule: Acceptance,
        noise: Noise,
        measure_tv: bool = False,
    ) -> Verdict:
        tokenwise, widths = verifier is verify_tokenwise, draft.tree.widths
        fits = on_host(logits) and not measure_tv and not sampling.greedy
        budget = rule.as_numbers(len(widths)) if fits else None
        if budget is not None and (tokenwise or rule.lossless or budget.optimal):
            u = noise.fine(Noise.ACCEPT, *((len(widths), max(widths, default=0)) if tokenwise else (1,)))
            last = noise.fine(Noise.BONUS, 1)
            found = backend.verify(draft, logits, sampling.warp, budget, u, last)
            if found is not None:
                return found
        return verifier(draft, logits, sampling, rule, noise, measure_tv)

    return either


@dataclass(frozen=True)
class DraftTraits:
    """The properties of drafts and sampling that decide which verifiers support them."""

    drafting: DraftSampling
    rule: Acceptance | type[Acceptance]
    greedy: bool
    residual: str | None  # as given by the user


def best_for(drafts: DraftTraits) -> str:
    """The verifier that accepts most for the same output distribution.

    On a chain that is block, where the rule's output distribution is fast. On a tree it is traversal for a lossless rule;
    a relaxed one has another output distribution there than token by token, where it relaxes again for every sibling.
    """
    if has_fast_distribution(drafts.rule) and why_unsupported(drafts, BLOCK) is None:
        return BLOCK
    return TRAVERSAL if drafts.rule.lossless and why_unsupported(drafts, TRAVERSAL) is None else TOKEN


def why_unsupported(drafts: DraftTraits, name: str) -> str | None:
    """Why a verifier does not support these drafts, in a sentence; None where it does."""
    if name == TOKEN:
        return None
    instead, drafting = f"use verify {TOKEN}", drafts.drafting
    if drafts.greedy:
        why = "at temperature 0 every verifier keeps the same codes"
    elif not drafting.samples_from_q:
        why = (
            f"the proposer {drafting.reason}, and every draft code must follow the distribution that it is "
            "offered with"
        )
    elif drafts.residual == "paper":
        why, instead = "the papers' residual is of token-wise verification", instead + ", or residual optimal"
    elif name == BLOCK and not drafting.chain:
        why = "the tree branches"
        if why_unsupported(drafts, TRAVERSAL) is None:
            instead = f"use verify {TRAVERSAL} or {TOKEN}"
    elif name == TRAVERSAL and not drafting.chain and not drafting.fixed:
        why = "the shape of the tree is decided while it is drawn"
    else:
        return None
    return f"verify {name} is not available here, as {why}; {instead}"
