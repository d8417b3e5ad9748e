"""What was tuned is a default where it was measured, and nowhere else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.models import write_model
from helpers.refusals import rejects

from lanternpp import Pipeline
from lanternpp.api.defaults import FILE, Defaults, tuned_path
from lanternpp.api.model import ASSETS

PROMPT, TREE = "a red tulip", "[[0],[1],[0,0]]"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with a tuning of lantern++ on it."""
    folder = write_model(tmp_path / "model")
    pipe = Pipeline.from_pretrained(str(folder), dtype="float32")
    settings = pipe.settings("lantern++", batch_size=1)
    Defaults.read(folder).add_tuned(
        "lantern++", pipe.conditions(settings), {"tree": TREE, "lam": 3.0}, machine={}
    )
    return folder


def settings(model: Path, method: str = "lantern++", dtype: str = "float32", **overrides):
    return Pipeline.from_pretrained(str(model), dtype=dtype).settings(method, **overrides)


def test_it_is_the_default_where_it_was_measured_and_options_override_it(model: Path) -> None:
    assert tuned_path(model) == model / FILE
    assert (settings(model).tree, settings(model).lam, settings(model).neighbours) == (TREE, 3.0, 8)
    assert settings(model, tree="chain-2").lam == 3.0 and settings(model, tree="chain-2").tree == "chain-2"
    assert settings(model, lam=1.5).lam == 1.5
    untuned = Pipeline.from_pretrained(str(model), dtype="float32", tuned=False).settings("lantern++")
    assert (untuned.tree, untuned.lam) == ("lantern-57", 2.0)
    stats = Pipeline.from_pretrained(str(model), dtype="float32")(PROMPT).stats
    assert stats.settings["tree"] == TREE and stats.settings["tuned"] is True
    assert Pipeline.from_pretrained(str(model))(PROMPT, tree="chain-2").stats.settings["tuned"] is False


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
def test_elsewhere_it_is_passed_over(model: Path, method: str, dtype: str, overrides: dict) -> None:
    assert settings(model, method, dtype, **overrides).tree in ("lantern-57", "eagle-25")


def test_other_weights_are_not_what_was_tuned(model: Path, tmp_path: Path) -> None:
    weights = model / "drafter" / "model.safetensors"
    other = shutil.copytree(model / "drafter", tmp_path / "other")
    pipe = Pipeline.from_pretrained(str(model), drafter=str(other), dtype="float32")
    assert pipe.settings("lantern++").tree == "lantern-57"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert settings(model).tree == "lantern-57"


def test_a_new_tuning_takes_the_place_of_the_old_one_alone(model: Path) -> None:
    pipe = Pipeline.from_pretrained(str(model), dtype="float32")
    for batch, tree in ((1, "[[0]]"), (2, "[[0],[1]]")):
        where = pipe.conditions(pipe.settings("lantern++", batch_size=batch))
        Defaults.read(model).add_tuned("lantern++", where, {"tree": tree})
    assert len(json.loads((model / FILE).read_text())["tuned"]) == 2
    assert (settings(model).tree, settings(model, batch_size=2).tree) == ("[[0]]", "[[0],[1]]")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"settings"', '"setings"'),
        lambda text: text.replace("[[0],[1],[0,0]]", "[[0],[0,0,0]]"),
        lambda text: text.replace('"lam"', '"temperature"'),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(model: Path, damage) -> None:
    (model / FILE).write_text(damage((model / FILE).read_text()))
    rejects(r"tuned.json is damaged.*lanternpp tune", Pipeline.from_pretrained, str(model))


def test_what_is_not_the_users_to_write_is_tuned_in_the_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fetched = write_model(tmp_path / "models--them--theirs" / "snapshots" / "abc")
    shipped, hub = tuned_path(ASSETS / "nature-128"), tuned_path(fetched)
    assert shipped.parent == hub.parent == tmp_path / "cache" / "lanternpp"
    assert shipped.name.startswith("tuned-") and shipped.name != hub.name
