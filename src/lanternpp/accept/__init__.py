"""Acceptance rules by the name that `--accept` takes."""

from __future__ import annotations

from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Cspd, Exact
from lanternpp.accept.mixture import DraftMixture
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.accept.scaled import Cactus, Cool

RULES: dict[str, type[Acceptance]] = {
    "exact": Exact,
    "lantern": Lantern,
    "lantern++": LanternPlusPlus,
    "cool": Cool,
    "cactus": Cactus,
    "mixture": DraftMixture,
    "cspd": Cspd,
}
