"""A method's settings: which dials its parts read, and what happens to the others."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from helpers.refusals import rejects

from lanternpp.api.options import METHODS
from lanternpp.api.settings import PART_DIALS, dials_read, for_target, resolve, with_tree
from lanternpp.trees.static import StaticTree


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_the_dials_its_parts_read_and_no_other(name: str) -> None:
    row = METHODS[name].dials
    read = dials_read(row["proposer"], row["accept"])
    settings = resolve(name, {}, {})
    for dial in set(PART_DIALS) - {"verify"}:
        said = row.get(dial)
        assert getattr(settings, dial) == said and (dial in read or said is None), dial


def test_a_dial_of_the_method_is_dropped_with_the_part_that_read_it() -> None:
    settings = resolve("lantern++", {}, {"accept": "exact"})
    assert (settings.neighbours, settings.lam, settings.tree) == (None, None, "lantern-57")
    settings = resolve("lantern++", {"methods": {"lantern++": {"lam": 5.0}}}, {"proposer": "jacobi"})
    assert (settings.lam, settings.tree) == (5.0, None)
    assert resolve("jacobi", {}, {"proposer": "tree"}).tree == "eagle-25"
    assert resolve("lantern", {"methods": {"lantern": {"lam": 3.0}}}, {}).lam is None


def test_defaults_are_lowered_to_the_codes_and_rows_of_a_model_and_given_options_are_not() -> None:
    few = SimpleNamespace(channels=0, vocab=3, length=8, width=4)
    large = {"methods": {"lantern-jacobi": {"alternatives": 3, "neighbours": 1000, "window_rows": 3}}}
    for given in ({}, {"alternatives": 4, "window_rows": 5, "neighbours": 6}):
        settings = for_target(resolve("lantern-jacobi", large, given), few, "few", given)
        most = {"alternatives": 2, "window_rows": 2, "neighbours": 2} | given
        assert {name: getattr(settings, name) for name in most} == most


def test_an_option_that_has_another_name_is_rejected_with_it() -> None:
    rejects("option 'siblings' is now 'alternatives'", resolve, "jacobi", {}, {"siblings": 2})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"verify": "blok"}, "verify 'blok' is unknown; did you mean 'block'"),
        ({"verify": "my_verifiers:mine"}, "verify 'my_verifiers:mine' is unknown; known: token"),
        ({"coupling": "maximum"}, "coupling 'maximum' is unknown; did you mean 'maximal'"),
    ],
)
def test_an_unknown_choice_is_rejected(given: dict[str, str], said: str) -> None:
    rejects(said, resolve, "jacobi", {}, given)
    rejects(f"the model's defaults: {said}", resolve, "jacobi", given, {})


def test_the_default_verifier_is_the_best_that_the_draft_allows() -> None:
    best = {name: resolve(name, {}, {}).verify for name in METHODS}
    for verify, methods in {
        "block": ("parallel", "independent", "jacobi"),
        "traversal": ("eagle", "jacobi-coupled", "lantern-jacobi"),
        "token": ("eagle2", "ddd", "lantern", "lantern-static", "lantern++"),
    }.items():
        assert {best[method] for method in methods} == {verify}
    assert resolve("eagle", {}, {"tree": "chain-4"}).verify == "block"
    for changed in ({"temperature": 0.0}, {"tree": "eagle2"}):
        assert resolve("parallel", {}, changed).verify == "token"
    relaxed = {"proposer": "parallel", "tree": "chain-4"}
    assert resolve("lantern++", {}, relaxed).verify == "block"
    assert resolve("lantern++", {}, relaxed | {"residual": "paper"}).verify == "token"
    assert resolve("jacobi", {}, {"coupling": "maximal"}).verify == "block"
    assert resolve("jacobi", {}, {"coupling": "gumbel"}).verify == "token"
    assert resolve("jacobi-coupled", {}, {"alternatives": 0}).verify == "block"
    assert resolve("lantern-jacobi", {}, {"residual": "paper"}).verify == "token"
    reported = {"methods": {"parallel": {"verify": "block"}}}
    assert resolve("parallel", reported, {"tree": "eagle-25"}).verify == "traversal", (
        "a default that no longer fits"
    )
    assert resolve("cool", {}, {"verify": "traversal"}).verify == "traversal"
    assert resolve("cool", {}, {"accept": "exact"}).verify == "traversal"


class Drawn(StaticTree):
    """A tree that is drawn, without a fixed shape."""

    fixed = False

    def __init__(self) -> None:
        super().__init__(((0,), (1,)))


@pytest.mark.parametrize(
    ("verify", "method", "given", "why"),
    [
        ("block", "jacobi", {"coupling": "gumbel"}, "the proposer keeps the noise .* .coupling gumbel."),
        ("block", "jacobi", {"alternatives": 1}, "the tree branches; use verify traversal or token"),
        (
            "block",
            "lantern-static",
            {"residual": "paper"},
            "the papers' residual is of token-wise verification",
        ),
        ("block", "ar", {}, "would change nothing"),
        ("traversal", "eagle", {"temperature": 0.0}, "at temperature 0 every verifier keeps the same"),
        ("traversal", "eagle2", {}, "offers the likeliest codes instead of drawing them"),
        ("traversal", "cool", {"residual": "paper"}, "use verify token, or residual optimal"),
        ("traversal", "eagle", {"tree": Drawn}, "decided while it is drawn; use verify token"),
    ],
)
def test_a_verifier_is_rejected_where_it_changes_the_distribution_or_has_no_effect(
    verify, method, given, why
) -> None:
    rejects(why, resolve, method, {}, given | {"verify": verify})
    own = {("ar", 0): None, ("eagle", 0): "traversal", ("jacobi", "alternatives"): "traversal"}
    assert resolve(method, {}, given).verify == own.get((method, next(iter(given), 0)), "token")


def test_traversal_of_a_chain_is_block_verification_and_not_its_default() -> None:
    for method in ("parallel", "jacobi"):
        assert resolve(method, {}, {"verify": "traversal"}).verify == "traversal"
        assert resolve(method, {}, {}).verify == "block"
    asked = resolve("eagle", {}, {"verify": "token"})
    assert with_tree(asked, "chain-4").verify == with_tree(asked, "deep-8").verify == "token"
    assert with_tree(resolve("eagle", {}, {}), "chain-4").verify == "block"


@pytest.mark.parametrize("name", METHODS)
def test_settings_given_back_are_the_same_settings(name: str) -> None:
    settings = resolve(name, {}, {})
    given = {field: value for field, value in asdict(settings).items() if field != "method"}
    assert resolve(name, {}, given) == replace(settings, fit=False), (
        "a draft that is given is not fitted again"
    )


class OwnChain(StaticTree):
    def grow(self, root, q, extend, children):
        raise AssertionError("grow was called")


def test_min_survival_is_for_chains_in_passes_of_any_length() -> None:
    """A given one is rejected for other drafts; a default is dropped."""
    default = {"methods": {"parallel": {"min_survival": 0.3}}}
    assert resolve("parallel", default, {}).min_survival == 0.3
    for given, why in (
        ({"tree": "eagle-25"}, "the tree branches; use a chain"),
        ({"tree": OwnChain([[0], [0, 0]])}, "the tree is no chain of the library's"),
        ({"compile": True}, "--compile needs passes of one"),
    ):
        rejects(f"min_survival 0.4 .*{why}", resolve, "parallel", default, given | {"min_survival": 0.4})
        assert resolve("parallel", default, given).min_survival is None
        assert resolve("parallel", {}, given | {"min_survival": 0.0}).min_survival == 0.0
    rejects(r"min_survival 0.4 would change nothing", resolve, "eagle", {}, {"min_survival": 0.4})
    assert with_tree(resolve("parallel", default, {}), "deep-8").min_survival is None
    assert with_tree(resolve("parallel", default, {}), "chain-4").min_survival == 0.3
