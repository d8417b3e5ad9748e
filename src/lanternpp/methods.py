"""The named methods: rows of proposer + tree + acceptance rule, each part overridable."""

from __future__ import annotations

from dataclasses import dataclass

from lanternpp.errors import InputError
from lanternpp.registry import unknown


@dataclass(frozen=True)
class Method:
    """One way of decoding. `settings` may carry neighbours (k), delta and lam (lambda)."""

    proposer: str
    accept: str
    tree: str | None = None
    neighbours: int | None = None
    delta: float | None = None
    lam: float | None = None
    about: str = ""


METHODS: dict[str, Method] = {
    "ar": Method("nothing", "exact", about="plain autoregressive decoding, one code per pass"),
    "eagle": Method(
        "tree", "exact", "eagle-25", about="EAGLE-1 on a static tree, lossless (arXiv 2401.15077)"
    ),
    "lantern": Method(
        "tree",
        "lantern",
        "eagle-25",
        1000,
        delta=0.2,
        about="LANTERN: additive relaxation (arXiv 2410.03355)",
    ),
    "lantern++": Method(
        "tree",
        "lantern++",
        "lantern-57",
        1000,
        lam=2.0,
        about="LANTERN++: static tree, multiplicative relaxation (arXiv 2502.06352)",
    ),
}


def method(name: str) -> Method:
    """A named method; InputError lists what exists."""
    if name not in METHODS:
        raise InputError(unknown("method", name, METHODS))
    return METHODS[name]
