"""Relaxed rules, and their distributions over three to five codes, few enough to enumerate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from helpers.distributions import Contexts
from lanternpp.accept.base import Acceptance
from lanternpp.accept.mixture import DraftMixture
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.accept.scaled import Cactus, Cool

OF_TABLE: dict[str, Callable[[Tensor], Acceptance]] = {  # of a table of neighbours
    "lantern": lambda table: Lantern(table, 0.3, "optimal"),
    "lantern, paper": lambda table: Lantern(table, 0.3, "paper"),
    "lantern++": lambda table: LanternPlusPlus(table, 2.5, "optimal"),
    "lantern++, falling": lambda table: LanternPlusPlus(table, 2.5, "optimal", nu=0.5),
    "cool": lambda table: Cool(1.4, 0.2),
    "cactus": lambda table: Cactus(0.02, 0.3),
    "mixture": lambda table: DraftMixture(0.3, 0.2),
}
TABLES = {v: torch.stack([torch.arange(1, v).add(i).remainder(v) for i in range(v)]).int() for v in (3, 4, 5)}
# for v codes, each of which has all others as neighbours
RULES = {name: lambda v, made=made: made(TABLES[v]) for name, made in OF_TABLE.items()}


def distributions_of(p: Contexts, q: Contexts, rule: Acceptance) -> Contexts:
    """The distribution of every context under a relaxed rule; after the last draft code the target's own."""
    return [rule.at(level).output_distribution(p[level], q[level]) for level in range(len(q))] + [p[-1]]
