"""`method="auto"`: the method that is used for a model where none is named, and the reason.

In this order: the method that the model's `defaults.json` names; the one that `lanternpp tune` was last run for with these
weights; the parallel drafter's chain; EAGLE's drafter; coupled Jacobi decoding, which needs no drafter. A method whose
network is missing is passed over. The last three are lossless:
`auto` relaxes only where the model or a tuning says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lanternpp.api.model import DEFAULTS, holds, latent_family, recognised, target_source
from lanternpp.api.options import AUTO, BASELINE, METHODS
from lanternpp.api.settings import network_needed, resolve
from lanternpp.api.tuned import Tuned
from lanternpp.drafters import DRAFTERS
from lanternpp.drafters.base import QueryDrafter
from lanternpp.errors import InputError
from lanternpp.nn.sources import Source
from lanternpp.util.registry import unknown


@dataclass(frozen=True)
class Chosen:
    """A method, and why it was taken."""

    method: str
    why: str | None = None  # None: it was named


def choose(
    requested: str,
    folder: Path,
    drafter: Path | None,
    defaults: Mapping[str, Any],
    tuned: Tuned | None,
) -> Chosen:
    """The method that `requested` stands for, for the model in `folder` and a given drafter or None.

    Reads at most the headers of a drafter. Raises InputError where the model's default is no method.
    """
    if requested != AUTO:
        return Chosen(requested)
    named = defaults.get("method")
    if named is not None and named not in METHODS:
        raise InputError(unknown(f"{folder / DEFAULTS}: method", str(named), METHODS))
    last = tuned.last_method() if tuned else None
    for method, why in ((named, "the model's own default"), (last, "tuned here last")):
        if method in METHODS and _possible(method, folder, drafter, defaults):
            return Chosen(method, why)
    whose = "its" if drafter is None else "the given"
    kind = (
        _drafts(drafter) if drafter else next((k for k in ("parallel", "drafter") if holds(folder, k)), None)
    )
    if kind == "parallel":
        return Chosen("parallel", f"{whose} parallel drafter, lossless")
    if kind == "independent":
        return Chosen("independent", f"{whose} smaller target drafts, lossless")
    if kind == "drafter":
        return Chosen("eagle", f"{whose} EAGLE drafter, lossless")
    if latent_family(folder):
        return Chosen(BASELINE, "no drafter for its latents")
    return Chosen("jacobi-coupled", "no drafter, lossless")


def _possible(method: str, folder: Path, drafter: Path | None, defaults: Mapping[str, Any]) -> bool:
    """Whether the network that a method drafts with on this model, if any, is there."""
    kind = network_needed(resolve(method, defaults, {}))
    return kind is None or drafter is not None or holds(folder, kind)


def _drafts(place: Path) -> str:
    """What kind of network a folder or file given as drafter holds, by the name of a model's folder for it."""
    for kind in ("parallel", "drafter"):
        if holds(place, kind):
            return kind
    try:
        entry = recognised("drafter", Source.open(place), DRAFTERS)
    except InputError:
        try:
            target_source(place)
        except InputError:
            return "drafter"  # the error is raised when it is read
        return "independent"
    return "parallel" if issubclass(entry, QueryDrafter) else "drafter"
