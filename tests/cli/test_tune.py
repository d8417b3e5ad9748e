"""`lanternpp tune` on the tiny model: what it writes, what becomes the default, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.classifiers import write_classifier
from PIL import Image

from lanternpp.nn import checkpoints
from lanternpp.tuning.study import Tuner
from lanternpp.util.files import locked

SMALL = ("--prompts", "p.txt", "--nodes", 5, "--depth", 3, "--rounds", 1, "--dtype", "float32")
FEW = (*SMALL, "--trials", 4)
QUIET = ("--no-plots", "--no-race")


@pytest.fixture
def own(model, tmp_path, empty_dir) -> Path:
    """A copy of the tiny model to tune, and two prompts."""
    (empty_dir / "p.txt").write_text("a red tulip\na tulip\n")
    return Path(shutil.copytree(model, tmp_path / "own"))


@pytest.fixture
def raced(monkeypatch):
    """Makes the race at the end measure these speed-ups of plain decoding, the method's own draft and the found one."""

    def measure(*speedups: float) -> None:
        race = Tuner.race

        def measured(*args):
            return [row | {"speedup": x} for row, x in zip(race(*args), speedups, strict=True)]

        monkeypatch.setattr(Tuner, "race", measured)
        monkeypatch.setattr(Tuner, "is_own_draft", lambda *_: False)

    return measure


def test_the_found_draft_becomes_the_default(run, own, raced):
    raced(1, 1.5, 2)
    reported = run("tune", "--model", own, *FEW, "-n", 1, "-o", "t", "--json").json
    assert reported == json.loads(Path("t/tune.json").read_text())
    assert list(reported["measured"]) == ["ar", "default", "tuned"] and len(reported["tried"]) == 4
    assert all(row["speedup"] > 0 for row in reported["measured"].values())
    for plot in ("history", "parameters"):
        with Image.open(f"t/{plot}.png") as image:
            assert image.width > 400 and len(image.convert("L").getcolors()) > 8
    entry = json.loads((own / "tuned.json").read_text())["tuned"][0]
    assert entry["machine"]["threads"] >= 1 and entry["speedup"] > 0 and entry["measured"]
    requested = ("generate", "a red tulip", "--model", own, "--dtype", "float32", "--json")
    drawn = run(*requested).json["settings"]
    assert drawn["tree"] == reported["settings"]["tree"] == entry["settings"]["tree"] and drawn["tuned"]
    assert run(*requested, "--tree", "chain-2").json["settings"]["tree"] == "chain-2"


@pytest.mark.parametrize(("speedups", "fastest"), [((1, 0.3, 0.2), "ar"), ((1, 3, 2), "default")])
def test_a_draft_that_the_race_finds_slower_is_not_saved(run, own, raced, speedups, fastest):
    raced(*speedups)
    outcome = run("tune", "--model", own, *FEW, "-n", 1, "-o", "t", "--no-plots")
    said = f"nothing was saved, as {fastest} measured {max(speedups):.2f}x and the found draft {speedups[2]:.2f}x"
    assert outcome.code == 0 and said in outcome.err and "now the default" not in outcome.out
    assert not (own / "tuned.json").exists() and Path("t/tune.json").exists()
    assert "a chain of " in outcome.out


def test_a_folder_is_for_one_tuning_at_a_time_and_for_one_drafter(run, own):
    asked = ("tune", "--model", own, *FEW, *QUIET, "-o", "t", "--no-save", "--method", "eagle")
    with locked(Path("t")):
        run(*asked).refused("t is being filled by another process")
    assert run(*asked).code == 0
    run(*asked, "--drafter", own / "parallel").failed("other settings (weights ", "begin anew with --restart")


def test_the_figures_are_shown_and_more_trials_go_on(run, own, monkeypatch):
    monkeypatch.setenv("COLUMNS", "25")
    asked = ("tune", "--model", own, *SMALL, *QUIET, "--no-save", "--lambda", 3)
    outcome = run(*asked, "--trials", 3)
    assert (outcome.code, outcome.err) == (0, "") and not (own / "tuned.json").exists()
    folder = Path("out/tune/own-lantern++")
    reported = json.loads((folder / "tune.json").read_text())
    assert reported["settings"]["lam"] == 3 and reported["measured"] == {}
    for one in reported["tried"]:
        assert f"{one['codes_per_pass']:.2f}" in outcome.out and f"{1000 * one['step']:.3g}" in outcome.out
    assert "…" not in outcome.out, "no figure is truncated on a narrow terminal"
    assert run(*asked, "--trials", 4).code == 0
    more = json.loads((folder / "tune.json").read_text())["tried"]
    assert len(more) == 4
    steps, more_steps = ({one["step"] for one in tried} for tried in (reported["tried"], more))
    assert steps < more_steps, "nothing is drawn again"
    assert "seed 0 -> 4" in run(*asked, "--trials", 3, "--seed", 4).err
    assert run(*asked, "--trials", 3, "--seed", 4, "--restart").code == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--method", "ar"), "'ar' has no draft to tune"),
        (("--method", "jacobi", "--window", 7, "--nodes", 5), "--nodes 5 are fewer than those of window 7"),
        (("--method", "eagle2"), "dynamic tree 'eagle2'"),
        (("--tree", "chain-2"), "--tree"),
        (("--measure-tv",), "--measure-tv"),
        (("--nodes", 0, "--depth", 33), "--nodes 0"),
        (("--budget-tv", -1), "--budget-tv -1"),
        (("--budget-tv", 1, "--budget-frechet", 1), "give one"),
        (("--budget-pictures", 9), "without a budget"),
        (("--no-race", "-n", 4), "leave out -n or --no-race"),
        (("--method", "eagle", "--budget-tv", 5), "'exact' has none"),
        (("--budget-frechet", 5, "--budget-pictures", 2), "2 are too few"),
        (("--budget-frechet", 5), "classifier"),
        (("--drafter", "nowhere"), "nowhere"),
    ],
)
def test_wrong_options_are_rejected(run, own, options, named):
    run("tune", "--model", own, "--prompts", "p.txt", *options).refused(named)


# One is named as a user's own rule, and the other has a dial that no method gives.
@pytest.mark.parametrize("rule", ["lanternpp.accept.neighbours:LanternPlusPlus", "lantern"])
def test_a_budget_of_variation_sets_the_strength_and_races_against_plain_decoding(rule, run, own, raced):
    raced(1, 3, 2)  # the method's own strength may cost more
    asked = ("tune", "--model", own, *FEW, "-n", 1, "--no-plots", "--budget-pictures", 2, "--accept", rule)
    shown = run(*asked, "-o", "t", "--budget-tv", 1000)
    assert shown.code == 0 and "of at most 1e+03" in shown.out and f", rule {rule}" in shown.out
    reported = json.loads(Path("t/tune.json").read_text())
    strength = reported["settings"]["delta" if rule == "lantern" else "lam"]
    assert strength >= (rule != "lantern") and reported["settings"]["neighbours"] >= 5
    assert reported["cost"] <= reported["limit"] == 1000
    asked = ("generate", "a red tulip", "--model", own, "--accept", rule, "--dtype", "float32", "--json")
    assert reported["settings"].items() <= run(*asked).json["settings"].items()


def test_a_budget_of_distance_is_measured_against_plain_decoding(run, own):
    write_classifier(own)
    asked = ("tune", "--model", own, *SMALL, *QUIET, "--trials", 2, "--neighbours", 5)
    asked += ("--lambda", 2, "--budget-frechet", 1e6, "--budget-pictures", 4, "-o", "t", "--json")
    reported = run(*asked).json
    assert 0 < reported["cost"] < reported["limit"]


def test_min_survival_is_tuned_with_the_chain_and_used(run, own):
    """With a parallel drafter that predicts what is accepted: more at some codes than at others."""
    config, tensors = checkpoints.load(own / "parallel")
    generator = torch.Generator().manual_seed(0)
    tensors["confidence.weight"] = torch.randn(1, len(tensors["fc.bias"]), generator=generator) / 4
    tensors["confidence.bias"] = torch.zeros(1)
    checkpoints.save(own / "parallel", config | {"confidence": True}, tensors)
    asked = ("tune", "--model", own, *FEW, *QUIET, "--method", "parallel", "--json")
    reported = run(*asked, "-o", "t", "--verify", "block").json
    assert all(0 <= one["overrides"]["min_survival"] <= 0.7 for one in reported["tried"])
    assert all(set(one["overrides"]["tree"]) <= set("[0],") for one in reported["tried"]), "chains alone"
    requested = ("generate", "a red tulip", "--model", own, "--dtype", "float32", "--json")
    drawn = run(*requested, "--method", "parallel").json["settings"]
    assert drawn["min_survival"] == reported["settings"]["min_survival"] and drawn["tuned"]
    branching = run(*requested, "--method", "parallel", "--tree", "deep-8").json["settings"]
    assert not branching["min_survival"]
    given = run(*asked, "-o", "u", "--min-survival", 0.35, "--no-save").json
    assert given["settings"]["min_survival"] == 0.35


def test_a_default_that_cannot_be_written_is_rejected_before_anything_is_drawn(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    run("tune", "--method", "eagle").refused("cannot be a folder", str(tmp_path / "file"))
