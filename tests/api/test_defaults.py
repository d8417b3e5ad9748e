"""A model's defaults: the method of `auto`, and tunings, which hold only where they were measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.models import update_json, write_model
from helpers.refusals import rejects

from lanternpp import Pipeline
from lanternpp.accept import RULES
from lanternpp.api.defaults import FILE, Chosen, Defaults, tuned_path
from lanternpp.api.model import ASSETS, model_folder
from lanternpp.api.options import METHODS, Settings
from lanternpp.serve.config import ServerConfig

PROMPT, TREE = "a red tulip", "[[0],[1],[0,0]]"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that names no method."""
    return without_a_default(write_model(tmp_path / "tiny"))


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """A model with a tuning of lantern++ on it."""
    folder = write_model(tmp_path / "model")
    tune(pipeline(folder), "lantern++", {"tree": TREE, "lam": 3.0})
    return folder


def without_a_default(folder: Path) -> Path:
    path = folder / "defaults.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "method"}))
    return folder


def pipeline(folder: Path, **options: object) -> Pipeline:
    return Pipeline.from_pretrained(folder, **{"device": "cpu", "dtype": "float32", **options})


def tune(pipe: Pipeline, method: str, found: dict[str, object], batch_size: int = 1) -> None:
    """Writes the result of a tuning."""
    conditions = pipe.conditions(pipe.settings(method, batch_size=batch_size))
    Defaults.read(pipe.folder).add_tuned(method, conditions, found, machine={})


def settings(
    folder: Path, method: str = "lantern++", dtype: str = "float32", **overrides: object
) -> Settings:
    return pipeline(folder, dtype=dtype).settings(method, **overrides)


def chosen(folder: Path, drafter: Path | None = None) -> Chosen:
    return Defaults.read(folder, drafter).chosen()


def test_auto_is_a_lossless_method_of_the_drafter_that_a_model_has(folder: Path) -> None:
    methods = [chosen(folder).method]
    for network in ("parallel", "drafter"):
        shutil.rmtree(folder / network)
        methods.append(chosen(folder).method)
    assert methods == ["parallel", "eagle", "jacobi-coupled"]
    assert all(RULES[METHODS[name].dials["accept"]].lossless for name in methods)


def test_auto_is_the_method_that_the_model_names_if_its_network_is_there(folder: Path) -> None:
    update_json(folder / "defaults.json", method="lantern-static")
    assert chosen(folder).method == "lantern-static"
    shutil.rmtree(folder / "parallel")
    shutil.rmtree(folder / "drafter")
    assert chosen(folder).method == "jacobi-coupled"
    update_json(folder / "defaults.json", method="fastest")
    rejects(r"defaults.json: method 'fastest' is unknown", chosen, folder)


def test_auto_is_then_the_method_that_was_tuned_last_for_these_weights(folder: Path) -> None:
    pipe = pipeline(folder)
    for method in ("eagle", "lantern++"):
        tune(pipe, method, {"tree": "chain-2"})
    assert chosen(folder).method == "lantern++"
    # The pictures of a call do not depend on their number.
    assert [pipeline(folder).settings(batch_size=n).method for n in (1, 4)] == ["lantern++"] * 2
    assert pipeline(folder, tuned=False).settings().method == "parallel"
    update_json(folder / "defaults.json", method="eagle2")
    assert chosen(folder).method == "eagle2"


@pytest.mark.parametrize(
    ("place", "method"),
    [("drafter", "eagle"), ("parallel", "parallel"), ("independent", "independent"), (".", "parallel")],
)
def test_auto_is_the_method_of_a_drafter_that_is_given(
    place: str, method: str, folder: Path, tmp_path: Path
) -> None:
    bare = without_a_default(write_model(tmp_path / "bare"))
    for kind in ("drafter", "parallel", "independent"):
        shutil.rmtree(bare / kind)
    given = Defaults.read(bare, folder / place)
    assert given.chosen().method == method
    assert given.holds("independent") is (place == "independent") is not given.holds("parallel")


def test_methods_of_the_papers_use_a_parallel_drafter_if_it_is_the_only_one(
    folder: Path, tmp_path: Path
) -> None:
    def draft(method: str, drafter: Path | None = None, **dials: str) -> tuple[str, str]:
        defaults = Defaults.read(folder, drafter)
        settings = defaults.settings(method, dials, {"device": "cpu", "dtype": "float32"})
        return settings.proposer, settings.tree

    parallel = shutil.copytree(folder / "parallel", tmp_path / "other")
    assert draft("lantern++") == ("tree", "lantern-57")
    assert draft("lantern++", parallel) == ("parallel", "chain-6")
    assert draft("eagle2", parallel) == ("parallel", "eagle2")
    shutil.rmtree(folder / "drafter")
    assert draft("cool") == ("parallel", "chain-6")
    assert draft("cool", tree="chain-2") == ("parallel", "chain-2")
    assert draft("eagle") == draft("lantern++", proposer="tree", tree="eagle-25") == ("tree", "eagle-25")
    rows = {"parallel": {"tree": "chain-3"}, "lantern": {"tree": "chain-4"}}
    update_json(folder / "defaults.json", methods=rows)
    assert draft("lantern++") == ("parallel", "chain-3")
    assert draft("lantern") == ("parallel", "chain-4")


def test_a_result_says_which_method_auto_is(folder: Path) -> None:
    pipe = pipeline(folder)
    drawn, named = pipe(PROMPT, seed=3), pipe(PROMPT, seed=3, method="parallel")
    assert drawn.stats.method == "parallel" and "drafter" in str(drawn.stats.auto)
    assert named.stats.auto is None and (drawn.codes == named.codes).all()


def test_the_shipped_model_draws_with_the_method_that_its_defaults_name() -> None:
    assert chosen(model_folder("nature-128")) == Chosen("lantern++", "the model's own default")


def test_dials_of_a_server_apply_to_the_method_of_auto(folder: Path) -> None:
    pipe, config = pipeline(folder), ServerConfig(overrides={"tree": "chain-2", "cfg": 4.0})
    for named in (None, "auto", "parallel"):
        settings = config.settings(pipe, named, {})
        assert (settings.method, settings.tree, settings.cfg) == ("parallel", "chain-2", 4.0)
    assert config.settings(pipe, "eagle", {}).tree == "eagle-25"


def test_dials_of_a_server_apply_to_its_own_rule(folder: Path) -> None:
    pipe, config = pipeline(folder), ServerConfig("lantern++", {"lam": 3.0, "tree": "chain-2"})
    for rule, lam in (("lantern++", 3.0), ("exact", None)):
        settings = config.settings(pipe, None, {"accept": rule})
        assert (settings.lam, settings.tree) == (lam, "chain-2")


def test_a_tuning_is_the_default_and_options_override_it(tuned: Path) -> None:
    assert tuned_path(tuned) == tuned / FILE
    found = settings(tuned)
    assert (found.tree, found.lam, found.neighbours) == (TREE, 3.0, 8)
    shorter = settings(tuned, tree="chain-2")
    assert (shorter.tree, shorter.lam) == ("chain-2", 3.0) and settings(tuned, lam=1.5).lam == 1.5
    assert settings(tuned, tree="chain-2", verify="block").verify == "block", "which needs the given tree"
    untuned = pipeline(tuned, tuned=False).settings("lantern++")
    assert (untuned.tree, untuned.lam) == ("lantern-57", 2.0)
    described = pipeline(tuned)(PROMPT).stats.settings
    assert described["tree"] == TREE and described["tuned"] is True
    assert pipeline(tuned)(PROMPT, tree="chain-2").stats.settings["tuned"] is False


@pytest.mark.parametrize(
    ("method", "dtype", "overrides"),
    [
        ("lantern++", "float64", {}),
        ("lantern++", "float32", {"batch_size": 2}),
        ("lantern++", "float32", {"compile": True}),
        ("lantern++", "float32", {"accept": "exact"}),
        ("eagle", "float32", {}),
    ],
)
def test_a_tuning_does_not_hold_for_other_conditions(
    tuned: Path, method: str, dtype: str, overrides: dict
) -> None:
    assert settings(tuned, method, dtype, **overrides).tree in ("lantern-57", "eagle-25")


def test_a_tuning_does_not_hold_for_other_weights(tuned: Path, tmp_path: Path) -> None:
    weights = tuned / "drafter" / "model.safetensors"
    other = shutil.copytree(tuned / "drafter", tmp_path / "other")
    assert pipeline(tuned, drafter=other).settings("lantern++").tree == "lantern-57"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert settings(tuned).tree == "lantern-57"


def test_a_new_tuning_replaces_the_one_of_the_same_conditions(tuned: Path) -> None:
    pipe = pipeline(tuned)
    for batch_size, tree in ((1, "[[0]]"), (2, "[[0],[1]]")):
        tune(pipe, "lantern++", {"tree": tree}, batch_size)
    assert len(json.loads((tuned / FILE).read_text())["tuned"]) == 2
    single = settings(tuned)
    assert (single.tree, settings(tuned, batch_size=2).tree) == ("[[0]]", "[[0],[1]]")
    assert pipeline(tuned).at_batch(single, 2).tree == "[[0],[1]]", "as a server does"
    tune(pipe, "jacobi", {"window": 3}, 2)
    assert pipeline(tuned).at_batch(pipe.settings("jacobi"), 2).window == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"settings"', '"setings"'),
        lambda text: text.replace("[[0],[1],[0,0]]", "[[0],[0,0,0]]"),
        lambda text: text.replace('"lam"', '"temperature"'),
    ],
)
def test_a_damaged_tuning_is_rejected(tuned: Path, damage) -> None:
    (tuned / FILE).write_text(damage((tuned / FILE).read_text()))
    rejects(r"tuned.json is damaged.*lanternpp tune", pipeline, tuned)


def test_tunings_of_shipped_and_downloaded_models_are_in_the_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fetched = write_model(tmp_path / "models--them--theirs" / "snapshots" / "abc")
    shipped, hub = tuned_path(ASSETS / "nature-128"), tuned_path(fetched)
    assert shipped.parent == hub.parent == tmp_path / "cache" / "lanternpp"
    assert shipped.name.startswith("tuned-") and shipped.name != hub.name
