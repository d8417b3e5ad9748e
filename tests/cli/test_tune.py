"""`lanternpp tune` on the tiny model: what it writes, what becomes the default, and what a stop loses."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.classifiers import write_classifier
from PIL import Image

from lanternpp.nn import checkpoints
from lanternpp.tuning import run as tuning
from lanternpp.tuning import search, trees
from lanternpp.tuning.journal import LINES

SMALL = ("--prompts", "p.txt", "--nodes", 5, "--depth", 3, "--rounds", 1, "-n", 1, "--dtype", "float32")


@pytest.fixture
def own(model, tmp_path, elsewhere) -> Path:
    """A copy of the tiny model to tune, and two prompts."""
    (elsewhere / "p.txt").write_text("a red tulip\na tulip\n")
    return Path(shutil.copytree(model, tmp_path / "own"))


def test_what_is_found_becomes_the_default(run, own):
    outcome = run("tune", "--model", own, *SMALL, "-o", "t", "--json")
    assert outcome.code == 0, outcome.err
    reported = json.loads(outcome.out)
    assert reported == json.loads(Path("t/tune.json").read_text()) | {"file": str(own / "tuned.json")}
    names = ["tuned", "deep-8", "eagle-25", "lantern-57"]
    assert [tree["name"] for tree in reported["trees"]] == names
    assert all(tree["measured"]["speedup"] > 0 < tree["speedup"] for tree in reported["trees"])
    assert reported["predicted"] == reported["trees"][0]["speedup"] and reported["plain"]["speedup"] == 1
    assert len(reported["sizes"]) == 5 and all(size["depth"] <= 3 for size in reported["sizes"])
    with Image.open("t/tune.png") as image:
        assert image.width > 400 and len(image.convert("L").getcolors()) > 8
    entry = json.loads((own / "tuned.json").read_text())["tuned"][0]
    assert entry["machine"]["threads"] >= 1 and entry["acceptance"]["tried"] and entry["measured"] > 0
    requested = ("generate", "a red tulip", "--model", own, "--dtype", "float32", "--json")
    drawn = json.loads(run(*requested).out)["settings"]
    assert json.loads(drawn["tree"]) == reported["trees"][0]["tree"] and drawn["tuned"]
    assert json.loads(run(*requested, "--tree", "chain-2").out)["settings"]["tree"] == "chain-2"


def test_the_figures_are_shown_without_matplotlib_too(run, own, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = run("tune", "--model", own, *SMALL, "--no-race", "--no-save", "--lambda", 3)
    assert outcome.code == 0 and not (own / "tuned.json").exists()
    assert outcome.err.count("\n") == 1 and "need matplotlib" in outcome.err
    for said in ("how often a child is kept", "a target pass", "the tree found", "predicted", "lantern-57"):
        assert said in outcome.out
    folder = Path("out/tune/own-lantern++")
    assert json.loads((folder / "tune.json").read_text())["settings"]["lam"] == 3
    assert not (folder / "tune.png").exists()


def test_no_figure_is_cut_on_a_narrow_terminal(run, own, monkeypatch):
    monkeypatch.setenv("COLUMNS", "25")
    outcome = run("tune", "--model", own, *SMALL, "--no-race", "--no-save", "--no-plots")
    assert outcome.code == 0 and "…" not in outcome.out
    reported = json.loads(Path("out/tune/own-lantern++/tune.json").read_text())
    costs = reported["costs"]["look"]
    for seconds in costs["cost"]:
        assert f"{1000 * seconds:.3g}" in outcome.out


def test_a_stop_loses_at_most_one_measurement(run, own, monkeypatch):
    requested = ("tune", "--model", own, *SMALL, "-o", "t", "--json", "--no-race", "--no-plots")
    first = json.loads(run(*requested).out)
    lines = Path("t", LINES).read_text().splitlines(keepends=True)
    Path("t", LINES).write_text("".join(lines[:2]) + lines[2][:50])
    drawn = []
    probe = tuning.probe
    monkeypatch.setattr(tuning, "probe", lambda *args: drawn.append(args[2]) or probe(*args))
    again = json.loads(run(*requested).out)
    assert Path("t", LINES).read_text().splitlines(keepends=True)[:2] == lines[:2]
    assert len(drawn) == len(Path("t", LINES).read_text().splitlines()) - 2
    assert again["acceptance"]["tried"][0][0] > 0
    drawn.clear()
    whole = json.loads(run(*requested).out)
    assert not drawn and whole == again and whole["model"] == first["model"]
    run(*requested, "--restart")
    assert len(drawn) >= len(lines) - trees.MAX_REPROBES > 2


def test_a_folder_of_something_else_is_left_alone(run, own):
    requested = ("tune", "--model", own, *SMALL, "--no-race", "--no-plots", "-o")
    assert run(*requested, "t").code == 0
    other = run(*requested, "t", "--lambda", 4)
    assert other.code == 2 and "other settings" in other.err and other.err.count("\n") == 1
    Path("b").mkdir()
    Path("b/run.json").write_text('{"methods": {}}')
    refused = run(*requested, "b", "--restart")
    assert refused.code == 2 and "something else" in refused.err and Path("b/run.json").exists()
    text = Path("t", LINES).read_text().splitlines(keepends=True)
    Path("t", LINES).write_text("{}\n" + "".join(text))
    damaged = run(*requested, "t")
    assert damaged.code == 2 and "line 1, is damaged" in damaged.err and "--restart" in damaged.err


@pytest.mark.parametrize("price", [1.0, 0.0])
def test_a_windows_dials_are_chosen_by_codes_and_by_what_passes_take(run, own, monkeypatch, price):
    """Guesses take plain steps, as many as the square of their number, or no time at all; this model keeps most of them."""
    probe, drawn = tuning.probe, []

    def priced(engine, plain, shape, *rest):
        drawn.append(shape)
        cost = price * (engine.proposer.size - 1) ** 2
        return replace(probe(engine, plain, shape, *rest), plain_step=1.0, draft=cost, look=1.0, judge=0.0)

    monkeypatch.setattr(tuning, "probe", priced)
    small = [*SMALL]
    small[small.index("--nodes") + 1], small[small.index("--depth") + 1] = 20, 8
    requested = ("tune", "--model", own, *small, "--method", "jacobi-coupled", "--init", "last", "-o", "t")
    outcome = run(*requested, "--json")
    assert outcome.code == 0, outcome.err
    reported = json.loads(outcome.out)
    tried, chosen = [size["dials"] for size in reported["sizes"]], reported["trees"][0]
    values = {name: {dials[name] for dials in tried} for name in chosen["dials"]}
    every = {"window": {2, 4, 6, 8}, "alternatives": {0, 1, 3, 6}, "init": {"last"}, "window_rows": {1, 2}}
    assert values == every and all(size["nodes"] <= 20 for size in reported["sizes"])
    most = max(size["codes_per_draft"] for size in reported["sizes"])
    assert chosen["nodes"] == 2 if price else chosen["codes_per_draft"] == most > 2
    assert chosen["measured"]["speedup"] > 0 and len(drawn) == len(tried)
    requested_picture = ("generate", "a red tulip", "--model", own, "--dtype", "float32", "--json")
    settings = json.loads(run(*requested_picture, "--method", "jacobi-coupled").out)["settings"]
    assert {name: settings[name] for name in chosen["dials"]} == chosen["dials"] and settings["tuned"]
    again = run(*requested, "--no-save", "--no-race")
    assert len(drawn) == len(tried)  # nothing is measured twice
    assert "windows that were tried" in again.out and "codes / s" in again.out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--method", "ar"), "'ar' has no draft to tune"),
        (("--method", "lantern-jacobi", "--budget-tv", 5), "'lantern-jacobi' has a window"),
        (("--method", "jacobi", "--window", 7), "--nodes 5 are fewer than those of window 7"),
        (("--method", "eagle2"), "dynamic tree 'eagle2'"),
        (("--tree", "chain-2"), "tune finds the tree"),
        (("--measure-tv",), "--budget-tv does that"),
        (("--nodes", 0), "--nodes 0"),
        (("--depth", 33), "--depth 33"),
        (("--rounds", 0), "--rounds 0"),
        (("--budget-tv", -1), "--budget-tv -1"),
        (("--budget-tv", 1, "--budget-frechet", 1), "give one"),
        (("--budget-pictures", 9), "without a budget"),
        (("--method", "eagle", "--budget-tv", 5), "'exact' does not read"),
        (("--prompts", "absent.txt"), "absent.txt"),
        (("--budget-frechet", 5, "--budget-pictures", 2), "2 are too few"),
        (("--budget-frechet", 5), "classifier"),
        (("--drafter", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_tuned_is_refused(run, own, options, named):
    outcome = run("tune", "--model", own, *SMALL, *options)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and named in outcome.err
    assert not (own / "tuned.json").exists()


def test_a_damaged_tuning_is_refused_by_every_verb(run, own):
    (own / "tuned.json").write_text("{")
    for verb in (("generate", "a red tulip"), ("tune", *SMALL)):
        outcome = run(*verb, "--model", own)
        assert outcome.code == 2 and outcome.err.count("\n") == 1 and "tuned.json is damaged" in outcome.err


def test_a_budget_of_variation_picks_the_dials(run, own):
    requested = ("tune", "--model", own, *SMALL, "--no-plots", "--no-race", "--budget-pictures", 2, "--json")
    reported = json.loads(run(*requested, "-o", "t", "--budget-tv", 1000).out)
    assert reported["settings"]["lam"] == 10 and reported["settings"]["neighbours"] in (5, 10)
    assert (
        reported["budget"]["spent"] <= reported["budget"]["limit"] == 1000
        and reported["budget"]["spread"] >= 0
    )
    entry = json.loads((own / "tuned.json").read_text())["tuned"][0]
    assert entry["settings"] == reported["settings"]
    none = run(*requested, "-o", "u", "--budget-tv", 0)
    assert none.code == 2 and "the least was" in none.err and none.err.count("\n") == 1


def test_a_budget_of_distance_is_measured_against_plain_decoding(run, own):
    write_classifier(own)
    requested = ("tune", "--model", own, *SMALL, "--no-plots", "--no-race", "--neighbours", 5, "--lambda", 2)
    outcome = run(*requested, "--budget-frechet", 1e6, "--budget-pictures", 4, "-o", "t")
    assert outcome.code == 0, outcome.err
    assert "k 5, lambda 2: spends" in outcome.out and "Plain AR, on which" in outcome.out
    reported = json.loads(Path("t/tune.json").read_text())
    assert reported["budget"]["limit"] == pytest.approx(reported["budget"]["plain"]["value"] * 10_001)
    assert [row["own_tree"] for row in reported["budget"]["looked"]] == [False, True]
    assert len(list(Path("t/pictures").glob("*.png"))) == 3 * 4


@pytest.fixture
def predicting(own) -> Path:
    """The model with a parallel drafter that predicts what is kept: more at some codes than at others."""
    config, tensors = checkpoints.load(own / "parallel")
    generator = torch.Generator().manual_seed(0)
    tensors["confidence.weight"] = torch.randn(1, len(tensors["fc.bias"]), generator=generator) / 4
    tensors["confidence.bias"] = torch.zeros(1)
    checkpoints.save(own / "parallel", config | {"confidence": True}, tensors)
    return own


def test_a_cut_is_tuned_with_the_chain_and_drawn_with(run, predicting, monkeypatch):
    monkeypatch.setattr(trees, "CUT_GAIN", 0.0)  # whatever the machine is doing
    asked = ("tune", "--model", predicting, *SMALL, "--method", "parallel", "--no-plots", "--json")
    outcome = run(*asked, "-o", "t")
    assert outcome.code == 0, outcome.err
    reported = json.loads(outcome.out)
    found = reported["trees"][0]
    assert (
        found["min_survival"] in search.CUTS and reported["settings"]["min_survival"] == found["min_survival"]
    )
    assert all(not any(path) for path in found["tree"]) and found["measured"]["codes_per_pass"] >= 1
    requested = ("generate", "a red tulip", "--model", predicting, "--dtype", "float32", "--json")
    drawn = json.loads(run(*requested, "--method", "parallel").out)["settings"]
    assert drawn["min_survival"] == found["min_survival"] and drawn["tuned"]
    assert (
        json.loads(run(*requested, "--method", "parallel", "--tree", "deep-8").out)["settings"][
            "min_survival"
        ]
        is None
    )
    given = run(*asked, "-o", "u", "--min-survival", 0.35, "--no-save", "--no-race")
    assert given.code == 0, given.err
    assert json.loads(given.out)["settings"]["min_survival"] == 0.35
    never = json.loads(run(*asked, "-o", "v", "--min-survival", 0, "--no-save", "--no-race").out)
    assert never["settings"]["min_survival"] == 0 and never["trees"][0]["min_survival"] == 0


def test_a_drafter_that_predicts_nothing_refuses_a_cut(run, own):
    refused = run("generate", "a red tulip", "--model", own, "--method", "parallel", "--min-survival", 0.3)
    assert refused.code == 2 and refused.err.count("\n") == 1 and "train it again" in refused.err
    branching = run(
        "generate",
        "a red tulip",
        "--model",
        own,
        "--method",
        "parallel",
        "--tree",
        "deep-8",
        "--min-survival",
        0.3,
    )
    assert branching.code == 2 and "the tree branches" in branching.err


def test_chains_alone_are_tuned_where_they_alone_can_be_verified_so(run, own):
    asked = ("tune", "--model", own, *SMALL, "--method", "parallel", "--verify", "block", "--no-plots")
    outcome = run(*asked, "-o", "t", "--json")
    assert outcome.code == 0, outcome.err
    reported = json.loads(outcome.out)
    assert [tree["name"] for tree in reported["trees"]] == ["tuned"]
    assert all(not any(path) for path in reported["trees"][0]["tree"])
    assert reported["costs"]["chains"]["verify"] == "block"


def test_what_trees_and_chains_keep_is_told_apart_where_they_are_verified_in_other_ways(run, own):
    """A relaxed rule walks trees and verifies chains as a block."""
    requested = (
        "tune",
        "--model",
        own,
        *SMALL,
        "--no-race",
        "--no-save",
        "--no-plots",
        "--method",
        "lantern++",
    )
    shown = run(*requested, "-o", "t")
    assert shown.code == 0 and "the same in chains" in shown.out
    reported = json.loads(Path("t/tune.json").read_text())
    costs, acceptance = reported["costs"], reported["acceptance"]
    assert (costs["trees"]["verify"], costs["chains"]["verify"]) == ("token", "block")
    assert acceptance["chains"]["tried"] != acceptance["tried"] and not any(
        acceptance["chains"]["tried"][0][1:]
    )
    lossless = json.loads(run(*requested[:-1], "eagle", "-o", "u", "--json").out)
    costs, acceptance = lossless["costs"], lossless["acceptance"]
    assert (costs["trees"]["verify"], costs["chains"]["verify"]) == ("traversal", "block")
    assert acceptance["chains"]["tried"] == acceptance["tried"]
