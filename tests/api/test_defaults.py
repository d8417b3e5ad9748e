"""What a model is drawn with by default: the method of `auto`, and what was tuned, where it was measured and nowhere else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.models import change, write_model
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
    """Writes what a tuning has found."""
    conditions = pipe.conditions(pipe.settings(method, batch_size=batch_size))
    Defaults.read(pipe.folder).add_tuned(method, conditions, found, machine={})


def settings(
    folder: Path, method: str = "lantern++", dtype: str = "float32", **overrides: object
) -> Settings:
    return pipeline(folder, dtype=dtype).settings(method, **overrides)


def chosen(folder: Path, drafter: Path | None = None) -> Chosen:
    return Defaults.read(folder, drafter).chosen()


def test_the_drafter_that_a_model_has_decides_and_what_is_taken_is_lossless(folder: Path) -> None:
    methods = [chosen(folder).method]
    for network in ("parallel", "drafter"):
        shutil.rmtree(folder / network)
        methods.append(chosen(folder).method)
    assert methods == ["parallel", "eagle", "jacobi-coupled"]
    assert all(RULES[METHODS[name].dials["accept"]].lossless for name in methods)


def test_what_the_model_names_comes_first_where_its_network_is_there(folder: Path) -> None:
    change(folder / "defaults.json", method="lantern-static")
    assert chosen(folder).method == "lantern-static"
    shutil.rmtree(folder / "parallel")
    shutil.rmtree(folder / "drafter")
    assert chosen(folder).method == "jacobi-coupled"
    change(folder / "defaults.json", method="fastest")
    rejects(r"defaults.json: method 'fastest' is unknown", chosen, folder)


def test_what_was_tuned_last_for_these_weights_comes_next(folder: Path) -> None:
    pipe = pipeline(folder)
    for method in ("eagle", "lantern++"):
        tune(pipe, method, {"tree": "chain-2"})
    assert chosen(folder).method == "lantern++"
    # The pictures of a call do not depend on their number.
    assert [pipeline(folder).settings(batch_size=n).method for n in (1, 4)] == ["lantern++"] * 2
    assert pipeline(folder, tuned=False).settings().method == "parallel"
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
    change(folder / "defaults.json", methods=rows)
    assert draft("lantern++") == ("parallel", "chain-3")
    assert draft("lantern") == ("parallel", "chain-4")


def test_it_draws_and_says_what_it_took(folder: Path) -> None:
    pipe = pipeline(folder)
    drawn, named = pipe(PROMPT, seed=3), pipe(PROMPT, seed=3, method="parallel")
    assert drawn.stats.method == "parallel" and "drafter" in str(drawn.stats.auto)
    assert named.stats.auto is None and (drawn.codes == named.codes).all()


def test_the_shipped_model_draws_with_the_method_that_its_defaults_name() -> None:
    assert chosen(model_folder("nature-128")) == Chosen("lantern++", "the model's own default")


def test_a_server_of_auto_gives_its_dials_to_the_method_that_auto_takes(folder: Path) -> None:
    pipe, config = pipeline(folder), ServerConfig(overrides={"tree": "chain-2", "cfg": 4.0})
    for named in (None, "auto", "parallel"):
        settings = config.settings(pipe, named, {})
        assert (settings.method, settings.tree, settings.cfg) == ("parallel", "chain-2", 4.0)
    assert config.settings(pipe, "eagle", {}).tree == "eagle-25"


def test_a_tuning_is_the_default_where_it_was_measured_and_options_override_it(tuned: Path) -> None:
    assert tuned_path(tuned) == tuned / FILE
    found = settings(tuned)
    assert (found.tree, found.lam, found.neighbours) == (TREE, 3.0, 8)
    shorter = settings(tuned, tree="chain-2")
    assert (shorter.tree, shorter.lam) == ("chain-2", 3.0) and settings(tuned, lam=1.5).lam == 1.5
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
def test_elsewhere_a_tuning_is_passed_over(tuned: Path, method: str, dtype: str, overrides: dict) -> None:
    assert settings(tuned, method, dtype, **overrides).tree in ("lantern-57", "eagle-25")


def test_other_weights_are_not_what_was_tuned(tuned: Path, tmp_path: Path) -> None:
    weights = tuned / "drafter" / "model.safetensors"
    other = shutil.copytree(tuned / "drafter", tmp_path / "other")
    assert pipeline(tuned, drafter=other).settings("lantern++").tree == "lantern-57"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert settings(tuned).tree == "lantern-57"


def test_a_new_tuning_takes_the_place_of_the_old_one_alone(tuned: Path) -> None:
    pipe = pipeline(tuned)
    for batch_size, tree in ((1, "[[0]]"), (2, "[[0],[1]]")):
        tune(pipe, "lantern++", {"tree": tree}, batch_size)
    assert len(json.loads((tuned / FILE).read_text())["tuned"]) == 2
    single = settings(tuned)
    assert (single.tree, settings(tuned, batch_size=2).tree) == ("[[0]]", "[[0],[1]]")
    assert pipeline(tuned).at_batch(single, 2).tree == "[[0],[1]]", "as a server asks"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"settings"', '"setings"'),
        lambda text: text.replace("[[0],[1],[0,0]]", "[[0],[0,0,0]]"),
        lambda text: text.replace('"lam"', '"temperature"'),
    ],
)
def test_a_damaged_tuning_is_refused_in_one_sentence(tuned: Path, damage) -> None:
    (tuned / FILE).write_text(damage((tuned / FILE).read_text()))
    rejects(r"tuned.json is damaged.*lanternpp tune", pipeline, tuned)


def test_what_is_not_the_users_to_write_is_tuned_in_the_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fetched = write_model(tmp_path / "models--them--theirs" / "snapshots" / "abc")
    shipped, hub = tuned_path(ASSETS / "nature-128"), tuned_path(fetched)
    assert shipped.parent == hub.parent == tmp_path / "cache" / "lanternpp"
    assert shipped.name.startswith("tuned-") and shipped.name != hub.name
