"""Relaxed rules over three to five codes, small enough to enumerate what they do."""

from __future__ import annotations

import torch

from helpers.distributions import Contexts
from lanternpp.accept.base import Acceptance
from lanternpp.accept.mixture import DraftMixture
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.accept.scaled import Cactus, Cool

TABLES = {v: torch.stack([torch.arange(1, v).add(i).remainder(v) for i in range(v)]).int() for v in (3, 4, 5)}
RULES = {
    "lantern": lambda v: Lantern(TABLES[v], 0.3, "optimal"),
    "lantern, paper": lambda v: Lantern(TABLES[v], 0.3, "paper"),
    "lantern++": lambda v: LanternPlusPlus(TABLES[v], 2.5, "optimal"),
    "lantern++, falling": lambda v: LanternPlusPlus(TABLES[v], 2.5, "optimal", nu=0.5),
    "cool": lambda v: Cool(1.4, 0.2),
    "cactus": lambda v: Cactus(0.02, 0.3),
    "mixture": lambda v: DraftMixture(0.3, 0.2),
}


def distributions_of(p: Contexts, q: Contexts, rule: Acceptance) -> Contexts:
    """The distribution of every context under a relaxed rule; behind the last guess the target's own."""
    return [rule.at(level).output_distribution(p[level], q[level]) for level in range(len(q))] + [p[-1]]
