"""Acceptance rules by the name that `--accept` takes; each is in the file of its paper."""

from __future__ import annotations

from lanternpp.accept.cactus import Cactus
from lanternpp.accept.cool import Cool
from lanternpp.accept.cspd import Cspd
from lanternpp.accept.exact import Exact
from lanternpp.accept.lantern import Lantern
from lanternpp.accept.lantern_pp import LanternPlusPlus
from lanternpp.accept.mixture import DraftMixture

RULES = {
    "exact": Exact,
    "lantern": Lantern,
    "lantern++": LanternPlusPlus,
    "cool": Cool,
    "cactus": Cactus,
    "mixture": DraftMixture,
    "cspd": Cspd,
}
