"""The named methods: a proposer, a tree and an acceptance rule each, which overrides may replace."""

from __future__ import annotations

from dataclasses import dataclass

from lanternpp.errors import InputError
from lanternpp.util.registry import unknown


@dataclass(frozen=True)
class Method:
    """One way of decoding: its parts, and their dials (`dials.py`); None: the part's own default."""

    proposer: str
    accept: str
    tree: str | None = None
    neighbours: int | None = None
    delta: float | None = None
    lam: float | None = None
    nu: float | None = None
    residual: str | None = None
    window: int | None = None
    coupling: str | None = None
    init: str | None = None
    alternatives: int | None = None
    window_rows: int | None = None
    verify: str | None = None
    min_survival: float | None = None
    about: str = ""


BASELINE = "ar"  # plain autoregressive decoding, the method without a draft
AUTO = "auto"  # the method that suits the model: see `default_method.py`
METHODS: dict[str, Method] = {
    "ar": Method("none", "exact", about="plain autoregressive decoding, one code per pass"),
    "eagle": Method("tree", "exact", "eagle-25", about="EAGLE-1 on a static tree (arXiv 2401.15077)"),
    "eagle2": Method(
        "tree", "exact", "eagle2", about="EAGLE-2: a tree that follows the drafter (arXiv 2406.16858)"
    ),
    "ddd": Method("tree", "exact", "ddd", about="EAGLE-2 of a depth decided on the way (arXiv 2409.00142)"),
    "parallel": Method(
        "parallel", "exact", "chain-6", about="a drafter that predicts all levels of a draft in one pass"
    ),
    "independent": Method(
        "independent",
        "exact",
        "chain-4",
        about="speculative sampling: a smaller target drafts (arXiv 2211.17192, 2302.01318)",
    ),
    "lantern": Method(
        "tree",
        "lantern",
        "eagle2",
        1000,
        delta=0.2,
        about="LANTERN: additive relaxation on EAGLE-2's tree (arXiv 2410.03355)",
    ),
    "lantern-static": Method(
        "tree",
        "lantern",
        "eagle-25",
        1000,
        delta=0.2,
        about="LANTERN's additive relaxation on EAGLE-1's static tree",
    ),
    "lantern++": Method(
        "tree",
        "lantern++",
        "lantern-57",
        1000,
        lam=2.0,
        about="LANTERN++: static tree, multiplicative relaxation (arXiv 2502.06352)",
    ),
    "cool": Method(
        "tree",
        "cool",
        "eagle-25",
        delta=1.5,
        nu=0.1,
        about="COOL-SD: relaxation that falls with the level, optimal residual (arXiv 2601.09212)",
    ),
    "jacobi": Method(
        "jacobi",
        "exact",
        window=16,
        coupling="none",
        init="uniform",
        about="speculative Jacobi decoding: no drafter (arXiv 2410.01699)",
    ),
    "jacobi-coupled": Method(
        "jacobi",
        "exact",
        window=16,
        coupling="maximal",
        init="mixed",
        alternatives=3,
        about="Jacobi decoding whose guesses rarely change (arXiv 2510.24211)",
    ),
    "lantern-jacobi": Method(
        "jacobi",
        "lantern++",
        None,
        1000,
        lam=2.0,
        window=16,
        coupling="maximal",
        init="mixed",
        alternatives=3,
        verify="traversal",
        about="coupled Jacobi decoding under the relaxation of LANTERN++",
    ),
}


def check_method(name: str) -> str:
    """The name of a method, or `AUTO`; InputError lists what exists."""
    if name != AUTO:
        method(name)
    return name


def method(name: str) -> Method:
    """A named method; InputError lists what exists."""
    if name not in METHODS:
        raise InputError(unknown("method", name, [*METHODS, AUTO]))
    return METHODS[name]
