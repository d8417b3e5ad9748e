"""`lanternpp bench` on the tiny model."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from helpers.classifiers import write_classifier
from PIL import Image


@pytest.fixture
def prompts(elsewhere: Path) -> Path:
    file = elsewhere / "prompts.txt"
    file.write_text("# two of them\na red tulip\n\na tulip\n")
    return file


def test_a_bench_writes_figures_plots_and_pictures(run, model, prompts):
    requested = ("--prompts", prompts, "--methods", "eagle, lantern++ lambda=3", "-n", 2, "-o", "b")
    outcome = run("bench", "--model", model, *requested, "--json")
    assert outcome.code == 0, outcome.err
    reported = json.loads(outcome.out)
    assert reported == json.loads(Path("b/bench.json").read_text())
    assert [row["method"] for row in reported["methods"]] == ["ar", "eagle", "lantern++ lambda=3"]
    assert reported["prompts"] == ["a red tulip", "a tulip"]
    for row in reported["methods"]:
        assert row["images"] == 4 and row["codes"] == 4 * 16 and row["codes_per_pass"] >= 1
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["codes_per_pass"])
        assert sum(row["phases"].values()) == pytest.approx(1, abs=1e-6)
        assert len(list(Path("b/pictures").glob("*/*.png"))) == 12
    assert reported["methods"][0]["speedup"] == 1 and reported["methods"][2]["settings"]["lam"] == 3
    assert Path("b/table.md").read_text().count("`") == 6
    for plot in ("rows.png", "passes.png", "speed.png"):
        with Image.open(f"b/{plot}") as image:
            assert image.width > 400 and len(image.convert("L").getcolors()) > 8


def test_without_matplotlib_there_are_figures_and_no_plots(run, model, prompts, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    requested = ("bench", "--model", model, "--prompts", prompts, "--methods", "ar", "-n", 1, "-o", "b")
    refused = run(*requested, "--plots")
    assert refused.code == 2 and "install lanternpp[eval]" in refused.err and not Path("b").exists()
    outcome = run(*requested)
    assert outcome.code == 0 and outcome.err.count("\n") == 1 and "need matplotlib" in outcome.err
    assert Path("b/table.md").exists() and not list(Path("b").glob("*.png"))


def test_a_profile_of_each_method_has_the_phases_and_the_operations_of_its_steps(run, model, prompts):
    requested = ("bench", "--model", model, "--prompts", prompts, "--methods", "eagle, lantern++ lambda=3")
    requested += ("-n", 1, "-o", "b", "--no-plots", "--no-measure-tv")
    assert run(*requested).code == 0 and not list(Path("b").glob("profile-*"))
    outcome = run(*requested, "--resume", "--profile")
    assert outcome.code == 0 and outcome.err == "" and "b/profile-*" in outcome.out
    assert "pass " in outcome.out.partition("most self time, %")[2]
    phases = {"draft", "pass", "verify", "rest"}
    for name in ("ar", "eagle", "lantern++_lambda=3"):
        table = Path(f"b/profile-{name}.txt").read_text()
        assert phases <= set(re.findall(r"^ *(\S+)", table, re.M))
        assert "aten::" in table or name != "eagle", "other methods take whole steps in C"
        began = defaultdict(list)
        for event in json.loads(Path(f"b/profile-{name}.json").read_text())["traceEvents"]:
            if event["ph"] == "X" and event.get("cat") == "user_annotation":
                began[event["name"]].append(event["ts"])
        steps = len(began["pass"])
        assert began.keys() == phases and len(began["verify"]) == steps
        assert steps == 15 if name == "ar" else 0 < steps < 15, (
            "a picture has 16 codes, one of them the prefill's"
        )
        assert sorted(began["pass"] + began["verify"])[::2] == sorted(began["pass"]), "in turn"
        assert len(re.findall(rf"^ *{re.escape(name.replace('_', ' '))}  ", outcome.out, re.M)) == 2, (
            "two tables"
        )
    told = run(*requested, "--resume", "--profile", "--json")
    assert json.loads(told.out) == json.loads(Path("b/bench.json").read_text())


def test_a_finished_bench_is_told_again_by_resume_and_never_overwritten(run, model, prompts):
    requested = (
        "bench",
        "--model",
        model,
        "--prompts",
        prompts,
        "--methods",
        "ar",
        "-n",
        1,
        "-o",
        "b",
        "--no-plots",
    )
    first = run(*requested, "--json")
    again = run(*requested)
    assert again.code == 2 and "--resume" in again.err and again.err.count("\n") == 1
    assert json.loads(run(*requested, "--resume", "--json").out) == json.loads(first.out)
    assert "table.md" in run(*requested, "--resume").out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--prompts", "absent.txt"), "absent.txt"),
        (("--prompts", "empty.txt"), "empty.txt"),
        ((), "--prompts FILE"),
        (("--methods", "ar,warp"), "warp"),
        (("--prompts", "prompts.txt", "-n", 3, "--batch-size", 2), "batches of 2"),
        (("--prompts", "prompts.txt", "--reference", "nowhere"), "nowhere"),
        (("--prompts", "prompts.txt", "--methods", "eagle tree=oak"), "oak"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_drawn(run, model, prompts, options, named):
    Path("empty.txt").write_text("\n# nothing\n")
    outcome = run("bench", "--model", model, "-o", "b", *options)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and named in outcome.err
    assert not Path("b").exists()


def test_pictures_too_few_to_measure_are_refused_if_asked_for_and_else_only_timed(
    run, model, prompts, tmp_path
):
    own = write_classifier(Path(shutil.copytree(model, tmp_path / "own")))
    requested = ("--model", own, "--prompts", prompts, "--methods", "ar", "--no-plots", "--no-measure-tv")
    (tmp_path / "red").mkdir()
    refused = run("bench", *requested, "-n", 1, "-o", "few", "--reference", tmp_path / "red")
    assert refused.code == 2 and "2 pictures of each method are too few" in refused.err
    assert not Path("few").exists()
    few, enough = (
        json.loads(run("bench", *requested, "-n", n, "-o", f"b{n}", "--json").out)["methods"][0]
        for n in (1, 2)
    )
    assert "frechet" not in few
    assert enough["frechet"] > 0 and {"precision", "recall", "prompt_accuracy"} <= enough.keys()


def test_rules_race_at_the_strengths_that_spend_the_same(run, model, prompts):
    field = "eagle accept=mixture, lantern++ k=5"
    asked = ("bench", "--model", model, "--prompts", prompts, "-n", 1, "-o", "b", "--no-plots", "--json")
    asked += ("--methods", field, "--equal-tv", "0.05,0.01", "--equal-pictures", 2, "--dtype", "float32")
    outcome = run(*asked)
    assert outcome.code == 0, outcome.err
    plain, *rows = json.loads(outcome.out)["methods"]
    assert plain["method"] == "ar" and "tv_per_code" not in plain
    assert [row["tv_budget"] for row in rows] == [0.01, 0.01, 0.05, 0.05]
    for row in rows:
        assert 0.3 * row["tv_budget"] < row["tv_per_code"] <= row["tv_budget"]
    (small, less), (great, more) = (
        [row["settings"][dial] for row in rows if row["method"].startswith(named)]
        for named, dial in (("eagle", "delta"), ("lantern++", "lam"))
    )
    assert 0 < small < less < 1 < great < more
    assert f"lantern++ k=5 lambda={great:.8g}" in [row["method"] for row in rows]
    assert "TV per code" in Path("b/table.md").read_text()
    assert run(*asked).code == 2, "the folder holds a run"
    lines = Path("b/strengths/measurements.jsonl").read_text()
    assert run(*asked, "--resume").code == 0
    assert Path("b/strengths/measurements.jsonl").read_text() == lines, "nothing is measured twice"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--equal-tv", "much"), "'much' must be numbers"),
        (("--equal-tv", "0.1,1"), "above 0 and below 1"),
        (("--equal-tv", "0.1", "--methods", "eagle"), "has the rule 'exact'"),
        (("--equal-tv", "0.1", "--methods", "lantern++ lambda=2"), "leave it out"),
    ],
)
def test_what_has_no_strength_to_find_is_refused(run, model, prompts, options, named):
    outcome = run("bench", "--model", model, "--prompts", prompts, "-n", 1, "-o", "b", *options)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and named in outcome.err
