"""The parts of an engine of toys, for steps of every proposer, rule and verifier."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from helpers.relaxed import OF_TABLE
from helpers.toys import ToyTarget, eagle, neighbours, parallel, smaller
from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Exact
from lanternpp.accept.neighbours import LanternPlusPlus
from lanternpp.accept.scaled import Cool
from lanternpp.api.settings import build_proposer, build_rule, resolve
from lanternpp.engine.proposer import Proposer
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.engine.verify import TOKEN, VERIFIERS
from lanternpp.proposers.draft_model import DraftModel
from lanternpp.proposers.jacobi import Jacobi
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.parallel import Parallel
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.dynamic import DynamicTree
from lanternpp.trees.static import StaticTree, chain

SMALL_TREE = ((0,), (1,), (0, 0), (0, 1))
PROPOSERS: dict[str, Callable[[ToyTarget], Proposer]] = {
    "none": lambda t: NoDraft(),
    "chain": lambda t: TreeProposer(eagle(t), StaticTree(chain(2))),
    "tree": lambda t: TreeProposer(eagle(t), StaticTree(SMALL_TREE)),
    "eagle2": lambda t: TreeProposer(eagle(t), DynamicTree(3, 2, 8)),
    "ddd": lambda t: TreeProposer(eagle(t), DynamicTree(3, 2, 8, 1, math.log(0.05))),
    "parallel": lambda t: Parallel(parallel(t), StaticTree(chain(3))),
    "parallel tree": lambda t: Parallel(parallel(t, aux_layers=(0,)), StaticTree(SMALL_TREE)),
    "independent": lambda t: DraftModel(smaller(t), StaticTree(SMALL_TREE)),
    "independent eagle2": lambda t: DraftModel(smaller(t), DynamicTree(3, 2, 8)),
    "jacobi none uniform": lambda t: Jacobi(3),
    "jacobi maximal mixed": lambda t: Jacobi(3, "maximal", "mixed"),
    "jacobi maximal last": lambda t: Jacobi(3, "maximal", "last"),
    "jacobi gumbel above": lambda t: Jacobi(3, "gumbel", "above"),
    "jacobi siblings": lambda t: Jacobi(3, "maximal", "mixed", 2),
    "jacobi rows": lambda t: Jacobi(3, "maximal", "mixed", 2, 2),
}
RULES: dict[str, Callable[[Tensor], Acceptance]] = {
    "exact": lambda table: Exact(),
    "lantern++, paper": lambda table: LanternPlusPlus(table, 2.5, "paper"),
    "cool, paper": lambda table: Cool(1.4, 0.2, "paper"),
    **OF_TABLE,
}
# Proposers whose drafts another verifier than the token-wise one supports.
JOINT = (
    ("chain", "block"),
    ("parallel", "block"),
    ("jacobi none uniform", "block"),
    ("jacobi maximal mixed", "block"),
    ("jacobi siblings", "traversal"),
    ("tree", "traversal"),
    ("parallel tree", "traversal"),
    ("independent", "traversal"),
)
SAMPLINGS = {"greedy": Sampling(0), "T=1": Sampling(), "warped": Sampling(0.8, 6, 0.9)}


def parts(
    drafts: str = "tree",
    accept: str = "exact",
    sampling: str = "T=1",
    cfg: float = 3.0,
    measure_tv: bool = False,
    verify: str = "token",
) -> tuple[Any, ...]:
    """The arguments of an `Engine` of two samples, by the names above."""
    target = ToyTarget()
    made = target, PROPOSERS[drafts](target), RULES[accept](neighbours(target.codebook, 5))
    return (*made, SAMPLINGS[sampling], Guidance(cfg), 2, measure_tv, VERIFIERS[verify])


def of_method(method: str, layers: int = 1) -> tuple[Any, ...]:
    """The arguments of an `Engine` of one sample with guidance, for the draft of a method's row and toys in bfloat16."""
    target = ToyTarget(vocab=64, grid=16, layers=layers)
    networks = {"drafter": eagle(target), "parallel": parallel(target, 6), "independent": smaller(target)}
    settings = resolve(method, {}, {"cfg": 3.0})
    proposer = build_proposer(settings, lambda kind: networks[kind].bfloat16())
    rule = build_rule(settings, lambda k: neighbours(target.codebook, 20))
    sampling, verifier = Sampling(settings.temperature), VERIFIERS[settings.verify or TOKEN]
    return target.bfloat16(), proposer, rule, sampling, Guidance(3.0), 1, False, verifier
