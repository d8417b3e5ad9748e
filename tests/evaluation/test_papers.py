"""Published settings: every method of every paper can be drawn, with the paper's draft whatever a model's defaults say."""

from __future__ import annotations

import pytest

from lanternpp.api.options import AUTO, BASELINE
from lanternpp.api.settings import resolve
from lanternpp.evaluation.papers import PAPERS, Paper
from lanternpp.evaluation.race import parse_methods
from lanternpp.trees import build_tree

OTHERS = {  # a model's own
    "cfg": 5.0,
    "methods": {
        "eagle2": {"proposer": "parallel", "tree": "chain-7"},
        "lantern": {"tree": "chain-7", "delta": 0.3},
        "lantern++": {"proposer": "parallel", "tree": "chain-7", "neighbours": 10, "lam": 3.0},
        "jacobi": {"window": 7, "alternatives": 2, "coupling": "maximal", "verify": "block"},
    },
}


@pytest.mark.parametrize("paper", PAPERS.values(), ids=PAPERS)
def test_settings_of_a_paper_do_not_depend_on_the_models_defaults(paper: Paper) -> None:
    plain, auto, *drafting = map(paper.entry, parse_methods(f"{AUTO}, {paper.methods}"))
    assert (plain.method, auto.method) == (BASELINE, AUTO) and not (plain.overrides or auto.overrides)
    assert drafting
    for entry in drafting:
        given = {"fit": False, **paper.sampling, **entry.overrides}
        settings = resolve(entry.method, OTHERS, given)
        assert settings == resolve(entry.method, {}, given), "the model's defaults change nothing"
        assert settings.verify == "token" and not settings.fit and settings.cfg == paper.sampling["cfg"]


def test_trees_have_the_sizes_of_the_papers() -> None:
    settings = {
        entry.label: resolve(entry.method, {}, paper.entry(entry).overrides)
        for paper in PAPERS.values()
        for entry in parse_methods(paper.methods)
    }
    sizes = {label: build_tree(each.tree).size for label, each in settings.items() if each.tree}
    assert sizes["eagle2 tree=eagle2-58"] == sizes["lantern tree=eagle2-58 k=1000 delta=0.4"] == 59
    assert sizes["lantern++ k=5 lambda=20"] == 58  # with the root
    assert sizes["eagle"] == sizes["lantern++ tree=eagle-25 k=5 lambda=20"] == 26
    assert settings["jacobi window=15 alternatives=0 window_rows=1"].window == 15
