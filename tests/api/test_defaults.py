"""`auto`: which method a model is drawn with where none is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.models import change, write_model
from helpers.refusals import rejects

from lanternpp import Pipeline
from lanternpp.accept import RULES
from lanternpp.api.defaults import Chosen, Defaults
from lanternpp.api.model import model_folder
from lanternpp.api.options import METHODS
from lanternpp.serve.config import ServerConfig

PROMPT = "a red tulip"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return without_a_default(write_model(tmp_path / "tiny"))


def without_a_default(folder: Path) -> Path:
    path = folder / "defaults.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "method"}))
    return folder


def chosen(folder: Path, drafter: Path | None = None) -> Chosen:
    return Defaults.read(folder, drafter).chosen()


def test_the_drafter_that_a_model_has_decides_and_what_is_taken_is_lossless(folder: Path) -> None:
    assert chosen(folder).method == "parallel"
    shutil.rmtree(folder / "parallel")
    assert chosen(folder).method == "eagle"
    shutil.rmtree(folder / "drafter")
    assert chosen(folder).method == "jacobi-coupled"
    assert all(
        RULES[METHODS[name].dials["accept"]].lossless for name in ("parallel", "eagle", "jacobi-coupled")
    )


def test_what_the_model_names_comes_first_where_its_network_is_there(folder: Path) -> None:
    change(folder / "defaults.json", method="lantern-static")
    assert chosen(folder).method == "lantern-static"
    shutil.rmtree(folder / "parallel")
    shutil.rmtree(folder / "drafter")
    assert chosen(folder).method == "jacobi-coupled"
    change(folder / "defaults.json", method="fastest")
    rejects(r"defaults.json: method 'fastest' is unknown", chosen, folder)


def test_what_was_tuned_last_for_these_weights_comes_next(folder: Path) -> None:
    pipe = Pipeline.from_pretrained(str(folder), device="cpu")
    for method in ("eagle", "lantern++"):
        where = pipe.conditions(pipe.settings(method, batch_size=1))
        Defaults.read(folder).add_tuned(method, where, {"tree": "chain-2"})
    assert chosen(folder).method == "lantern++"
    tuned = Pipeline.from_pretrained(str(folder), device="cpu")
    assert tuned.settings(batch_size=1).tree == "chain-2"
    assert (
        tuned.settings(batch_size=4).method == "lantern++"
    )  # its pictures do not depend on how many there are
    assert Pipeline.from_pretrained(str(folder), device="cpu", tuned=False).settings().method == "parallel"
    change(folder / "defaults.json", method="eagle2")
    assert chosen(folder).method == "eagle2"


@pytest.mark.parametrize(
    ("place", "method"),
    [("drafter", "eagle"), ("parallel", "parallel"), ("independent", "independent"), (".", "parallel")],
)
def test_a_drafter_that_is_given_decides_by_what_it_is(
    place: str, method: str, folder: Path, tmp_path: Path
) -> None:
    bare = without_a_default(write_model(tmp_path / "bare"))
    for kind in ("drafter", "parallel", "independent"):
        shutil.rmtree(bare / kind)
    given = Defaults.read(bare, folder / place)
    assert given.chosen().method == method
    assert given.holds("independent") is (place == "independent") is not given.holds("parallel")


def test_methods_of_the_papers_drafter_take_the_parallel_one_where_it_is_the_only_one(
    folder: Path, tmp_path: Path
) -> None:
    def draft(method: str, drafter: Path | None = None, **dials: str) -> tuple[str, str]:
        settings = Defaults.read(folder, drafter).settings(
            method, dials, {"device": "cpu", "dtype": "float32"}
        )
        return settings.proposer, settings.tree

    parallel = shutil.copytree(folder / "parallel", tmp_path / "other")
    assert draft("lantern++") == ("tree", "lantern-57")
    assert draft("lantern++", parallel) == ("parallel", "chain-6")
    assert draft("eagle2", parallel) == ("parallel", "eagle2")
    shutil.rmtree(folder / "drafter")
    assert draft("cool") == ("parallel", "chain-6")
    assert draft("cool", tree="chain-2") == ("parallel", "chain-2")
    assert draft("eagle") == draft("lantern++", proposer="tree", tree="eagle-25") == ("tree", "eagle-25")
    change(
        folder / "defaults.json", methods={"parallel": {"tree": "chain-3"}, "lantern": {"tree": "chain-4"}}
    )
    assert draft("lantern++") == ("parallel", "chain-3")
    assert draft("lantern") == ("parallel", "chain-4")


def test_it_draws_and_says_what_it_took(folder: Path) -> None:
    pipe = Pipeline.from_pretrained(str(folder), device="cpu")
    drawn, named = pipe(PROMPT, seed=3), pipe(PROMPT, seed=3, method="parallel")
    assert drawn.stats.method == "parallel" and "drafter" in str(drawn.stats.auto)
    assert named.stats.auto is None and (drawn.codes == named.codes).all()
    assert drawn.stats.settings == named.stats.settings
    rejects("method 'parallel', which auto takes here, has the proposer", pipe, PROMPT, lam=3.0)


def test_the_shipped_model_draws_with_the_method_that_its_defaults_name() -> None:
    folder = model_folder("nature-128")
    assert chosen(folder) == Chosen("lantern++", "the model's own default")


def test_a_server_of_auto_gives_its_dials_to_the_method_that_auto_takes(folder: Path) -> None:
    pipe = Pipeline.from_pretrained(str(folder), device="cpu")
    config = ServerConfig(overrides={"tree": "chain-2", "cfg": 4.0})
    for named in (None, "auto", "parallel"):
        settings = config.settings(pipe, named, {})
        assert (settings.method, settings.tree, settings.cfg) == ("parallel", "chain-2", 4.0)
    assert config.settings(pipe, "eagle", {}).tree == "eagle-25"
