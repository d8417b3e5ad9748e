"""Names in files are entries of a registry; only names that the caller gives are imported."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers.models import update_json, write_model
from helpers.refusals import rejects
from safetensors.torch import load_file, save_file

from lanternpp import InputError, Pipeline
from lanternpp.api.defaults import FILE, Defaults
from lanternpp.api.settings import resolve
from lanternpp.trees import build_tree
from lanternpp.trees.dynamic import DynamicTree
from lanternpp.util.registry import find

PROMPT = "a red tulip"
MARK = "imported_by_a_file"  # a module that must not be imported


@pytest.fixture
def forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an entry whose module must never be imported."""
    place = tmp_path / "path"
    place.mkdir()
    (place / f"{MARK}.py").write_text("class Part:\n    pass\n")
    monkeypatch.syspath_prepend(place)
    yield f"{MARK}:Part"
    assert MARK not in sys.modules


@pytest.mark.parametrize("part", ["tree", "proposer", "accept"])
@pytest.mark.parametrize("deep", [True, False])
def test_defaults_import_nothing(forbidden: str, part: str, deep: bool, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    said = {part: forbidden}
    update_json(folder / "defaults.json", **({"methods": {"lantern++": said}} if deep else said))
    pipe = None
    with pytest.raises(InputError, match=f"{MARK}.*not from a file"):
        pipe = Pipeline.from_pretrained(str(folder))
        pipe(PROMPT, method="lantern++")
    if pipe is not None:
        ours = {"tree": "chain-2", "proposer": "tree", "accept": "exact"}[part]
        pipe(PROMPT, method="lantern++", **{part: ours})


def test_only_the_caller_may_name_a_tree_file_which_is_read_at_every_call(
    forbidden: str, tmp_path: Path
) -> None:
    folder, file = write_model(tmp_path / "model"), tmp_path / "t.json"
    update_json(folder / "defaults.json", tree=str(file))
    pipe = Pipeline.from_pretrained(str(folder))
    for paths in ("[[0],[1]]", "[[0],[1],[2]]"):
        file.write_text(paths)
        rejects(r"tree .* is unknown", pipe, PROMPT)
        assert pipe(PROMPT, method="eagle", tree=file).stats.settings["tree"] == paths


@pytest.mark.parametrize("network", ["target", "drafter", "parallel", "tokenizer"])
def test_a_kind_imports_nothing(forbidden: str, network: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    update_json(folder / network / "config.json", kind=forbidden)
    said = rf"known here \(it calls itself '{MARK}:Part'\)"
    if network == "tokenizer":
        said = f"kind '{MARK}:Part' cannot be used: it should be 'vq' or 'kl'"
    with pytest.raises(InputError, match=said):
        Pipeline.from_pretrained(str(folder))(PROMPT, method="parallel" if network == "parallel" else "eagle")


def test_a_tuning_imports_nothing(forbidden: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    pipe = Pipeline.from_pretrained(str(folder))
    where = pipe.conditions(pipe.settings("lantern++", batch_size=1))
    Defaults.read(folder).add_tuned("lantern++", where, {"tree": forbidden})
    rejects(f"{FILE} is damaged.*{MARK}", Pipeline.from_pretrained, str(folder))


def test_a_checkpoint_that_others_published_imports_nothing(forbidden: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    tensors = load_file(folder / "target" / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"kind": forbidden, "model_type": forbidden, "architectures": [forbidden]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rejects("is no model family known here", Pipeline.from_pretrained, str(tmp_path))


def test_parts_that_the_caller_gives_stay_the_same_in_copies_and_are_text_in_files() -> None:
    name = "lanternpp.trees.dynamic:DynamicTree"
    trees = {name: (name, 60), f"{name} (an object)": (DynamicTree(nodes=9), 10)}
    for text, (tree, size) in trees.items():
        settings = resolve("eagle", {}, {"tree": tree})
        for copied in (settings, copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):
            assert build_tree(copied.tree).size == size and str(copied.tree) == text
        for plain in (asdict(settings)["tree"], json.loads(json.dumps(settings.tree))):
            rejects("command line and in Python", build_tree, plain)
    assert resolve("eagle", {}, {"tree": name}) == resolve("eagle", {}, {"tree": DynamicTree})


@pytest.mark.parametrize("name", [None, 3, ["exact"], {"a": 1}, ""])
def test_other_types_are_unknown_names(name: object) -> None:
    with pytest.raises(InputError, match="is unknown"):
        find("rule", name, {"exact": object})
