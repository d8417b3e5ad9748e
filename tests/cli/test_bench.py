"""`lanternpp bench` on the tiny model."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from helpers.classifiers import splashes, write_classifier
from PIL import Image

from lanternpp import Pipeline
from lanternpp.api.model import ASSETS
from lanternpp.api.picture import save_png


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
    assert "of memory bandwidth, %" in outcome.out and "of arithmetic, %" in outcome.out
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
        assert len(re.findall(rf"^ *{re.escape(name.replace('_', ' '))}(?:  |$)", outcome.out, re.M)) == 2, (
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
    requested = (
        "--model",
        own,
        "--prompts",
        prompts,
        "--methods",
        "ar",
        "--no-plots",
        "--no-measure-tv",
    )
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
    lines = Path("b/strengths/tv.jsonl").read_text()
    assert run(*asked, "--resume").code == 0
    assert Path("b/strengths/tv.jsonl").read_text() == lines, "nothing is measured twice"


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


def test_methods_race_at_every_batch_size_and_a_stop_loses_one_turn(run, model, prompts):
    requested = ("bench", "--model", model, "--prompts", prompts, "--batch-sizes", "2,1", "-n", 2, "-o", "b")
    requested += ("--methods", "parallel tree=chain-3", "--dtype", "float32", "--no-measure-tv", "--json")
    outcome = run(*requested)
    assert outcome.code == 0, outcome.err
    rows = json.loads(outcome.out)["methods"]
    assert [(row["batch_size"], row["method"]) for row in rows] == [
        (size, method) for size in (1, 2) for method in ("ar", "parallel tree=chain-3")
    ]
    for row in rows:
        assert row["images"] == 2 * 2 * row["batch_size"], "twice as many as the batch has, each turn"
        assert row["pictures_per_second"] == pytest.approx(row["images"] / row["seconds"])
        assert row["draft"] == ("none" if row["method"] == "ar" else "chain-3")
    table = Path("b/table.md").read_text().splitlines()
    assert table[0].startswith("| method | batch | draft | pictures per s |") and "| `chain-3` |" in table[-3]
    with Image.open("b/throughput.png") as image:
        assert image.width > 800
    log = Path("b/batch-2/turns.jsonl")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:-1]) + lines[-1][:20])
    assert run(*requested).code == 2, "the folder holds a run"
    assert run(*requested, "--resume").code == 0
    assert log.read_text().splitlines(keepends=True)[:-1] == lines[:-1]
    assert len(log.read_text().splitlines()) == len(lines)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--batch-sizes", "1,x"), "'1,x'"),
        (("--batch-sizes", "0,2"), "'0,2'"),
        (("--batch-sizes", ""), "''"),
        (("--batch-sizes", "1", "--batch-size", 2), "--batch-sizes"),
        (("--pictures", "none"), "none is no folder"),
        (("--pictures", "mine"), "holds 3 pictures; at least 4 are needed"),
        (("--pictures", "mine", "--methods", "ar"), "draws nothing"),
        (("--pictures", "mine", "--features", "inceptoin"), "holds 3 pictures"),
        (("--features", "inceptoin"), "did you mean 'inception'?"),
        (("--quality", "--methods", "ar"), "has no classifier"),
    ],
)
def test_sizes_and_pictures_that_cannot_be_measured_are_refused(run, model, prompts, options, named):
    saved(Path("mine"), splashes("red", 3))
    outcome = run("bench", "--model", model, "--prompts", prompts, "-o", "b", *options)
    if "--pictures" in options:
        outcome = run("bench", "--model", model, "-o", "b", *options)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and named in outcome.err
    assert not Path("b").exists()


def saved(folder: Path, images: list[Image.Image], **notes: str) -> Path:
    for i, image in enumerate(images):
        save_png(image, folder / f"{i:02d}.png", notes)
    return folder


def test_a_folder_of_pictures_is_measured_without_drawing(run, model, tmp_path, elsewhere, monkeypatch):
    own = write_classifier(Path(shutil.copytree(model, tmp_path / "own")))
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda **_: pytest.fail("a model was read"))
    saved(elsewhere / "mine", splashes("red", 6), prompt="a red tulip")
    outcome = run("bench", "--pictures", "mine", "--model", own, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    row = json.loads(outcome.out)
    assert row["images"] == 6 and row["folder"] == "mine" and row["prompt_accuracy"] == 1
    assert row["features"] == "classifier" and row["reference_images"] == 24
    assert row["frechet"] >= 0 and 0 <= row["precision"] <= 1 and 0 <= row["recall"] <= 1
    table = run("bench", "--pictures", "mine", "--model", own)
    assert table.code == 0 and "Fréchet" in table.out and "100 %" in table.out
    for name in ("blue", "photos/val"):
        saved(elsewhere / name, splashes("blue", 6))
    same = ("--pictures", "blue", "--model", own, "--reference", "photos", "--json")
    row = json.loads(run("bench", *same).out)
    assert row["frechet"] == pytest.approx(0, abs=1e-6) and row["precision"] == row["recall"] == 1
    assert row["reference"] == "photos/val" and "prompt_accuracy" not in row


@pytest.mark.parametrize(
    ("verb", "now"),
    [("eval", "bench --quality"), ("throughput", "bench --batch-sizes"), ("gpu-report", "make gpu")],
)
def test_verbs_that_are_now_options_are_named(run, verb, now):
    outcome = run(verb, "x")
    assert outcome.code == 2 and outcome.err == f"lanternpp: error: `{verb}` is now `{now}`\n"


@pytest.mark.skipif(
    not (ASSETS / "nature-128" / "classifier").is_dir(), reason="this checkout holds no classifier"
)
def test_the_shipped_classifier_knows_what_the_shipped_model_drew(run, prompts):
    prompts.write_text(
        "a photo of a sunflower under a blue sky\na photo of the sea at sunset\na photo of a forest\n"
    )
    asked = (
        "--methods",
        "lantern++",
        "-n",
        2,
        "--prompts",
        prompts,
        "--no-measure-tv",
        "--no-plots",
        "--json",
    )
    outcome = run("bench", *asked)
    assert (outcome.code, outcome.err) == (0, "")
    for row in json.loads(outcome.out)["methods"]:
        assert row["prompt_accuracy"] >= 4 / 6 and row["frechet"] > 0 and row["precision"] > 0
