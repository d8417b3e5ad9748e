"""`lanternpp bench` on the tiny model."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.classifiers import noisy_pictures, write_classifier
from helpers.latents import write_diffusion
from PIL import Image

from lanternpp import Pipeline
from lanternpp.api.picture import save_png
from lanternpp.evaluation import profile
from lanternpp.util.files import locked

PROMPTS = ("--prompts", "prompts.txt")


@pytest.fixture
def prompts(empty_dir: Path) -> Path:
    file = empty_dir / "prompts.txt"
    file.write_text("# two of them\na red tulip\n\na tulip\n")
    return file


@pytest.fixture
def bench(run, model, prompts):
    """Runs `bench` of these methods and options, for the prompts, to the folder b."""

    def command(methods: str, *options: object, of: Path = model, to: str = "b"):
        return run("bench", "--model", of, *PROMPTS, "--methods", methods, "-o", to, *options)

    return command


@pytest.fixture
def own(model, tmp_path) -> Path:
    """A copy of the tiny model with a classifier."""
    return write_classifier(Path(shutil.copytree(model, tmp_path / "own")))


def test_a_bench_writes_figures_plots_and_pictures_and_resume_reports_them_again(bench):
    requested = ("eagle, lantern++ lambda=3", "-n", 2)
    reported = bench(*requested, "--json").json
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
    bench(*requested).refused("--resume")
    with locked(Path("b")):
        bench(*requested, "--resume").refused("b is being filled by another process")
    assert bench(*requested, "--resume", "--json").json == reported
    assert "table.md" in bench(*requested, "--resume").out


def test_a_paper_gives_the_settings_of_the_pictures_and_the_columns_of_its_table(bench, own):
    (own / "defaults.json").write_text('{"cfg": 5.0, "methods": {"eagle": {"tree": "chain-3"}}}')
    asked = ("--paper", "lantern++-lumina", "-n", 2, "--no-plots", "--no-measure-tv", "--top-k", 0)
    reported = bench("eagle, lantern++ k=5 lambda=10", *asked, "--json", of=own).json
    assert "2502.06352" in reported["paper"] and "2502.06352" in Path("b/paper.md").read_text()
    drawn = {}
    for slug in ("ar", "eagle", "lantern++_k=5_lambda=10"):
        captions = Path(f"b/pictures/{slug}/metadata.jsonl").read_text().splitlines()
        first, *_ = rows = [json.loads(row) for row in captions]
        assert [row["text"] for row in rows] == ["a red tulip"] * 2 + ["a tulip"] * 2
        with Image.open(f"b/pictures/{slug}/{first['file_name']}") as image:
            assert image.info["prompt"] == first["text"]
            drawn[slug] = json.loads(image.info["settings"])
    # --top-k overrides the paper's, and the paper's the model's defaults
    assert all((each["cfg"], each["top_k"], each["fit"]) == (3.0, 0, False) for each in drawn.values())
    assert drawn["eagle"]["tree"] == "eagle-25" and drawn["lantern++_k=5_lambda=10"]["verify"] == "token"
    rows = list(csv.DictReader(Path("b/paper.csv").read_text().splitlines()))
    assert [float(row["latency"]) for row in rows] == [row["latency"] for row in reported["methods"]]
    assert "frechet" in rows[0]
    shown = bench("eagle, lantern++ k=5 lambda=10", *asked, "--resume", of=own).out
    assert "step compression" in shown and "codes per pass" not in shown


def test_without_matplotlib_there_are_figures_and_no_plots(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    bench("ar", "-n", 1, "--plots").refused("install lanternpp[eval]")
    assert not Path("b").exists()
    outcome = bench("ar", "-n", 1)
    assert outcome.code == 0 and outcome.err.count("\n") == 1 and "need matplotlib" in outcome.err
    assert Path("b/table.md").exists() and not list(Path("b").glob("*.png"))


def test_a_profile_of_each_method_has_the_phases_and_the_operations_of_its_steps(bench, monkeypatch):
    monkeypatch.setattr(profile, "COPY_BYTES", 1 << 16)  # the machine is measured on little
    monkeypatch.setattr(profile, "MATRIX_SIDE", 32)
    outcome = bench("eagle, lantern++ lambda=3", "-n", 1, "--no-plots", "--no-measure-tv", "--profile")
    assert outcome.code == 0 and outcome.err == "" and "b/profile-*" in outcome.out
    assert "pass " in outcome.out.partition("most self time, %")[2]
    assert "of memory bandwidth, %" in outcome.out and "of arithmetic, %" in outcome.out
    phases = {"draft", "pass", "verify", "rest"}
    for name in ("ar", "eagle", "lantern++_lambda=3"):
        table = Path(f"b/profile-{name}.txt").read_text()
        assert phases <= set(re.findall(r"^ *(\S+)", table, re.M))
        assert "aten::" in table or name != "eagle", "other methods take whole steps in C"
        marks = [
            (event["ts"], event["name"], event["ts"] + event["dur"])
            for event in json.loads(Path(f"b/profile-{name}.json").read_text())["traceEvents"]
            if event["ph"] == "X" and event.get("cat") == "user_annotation"
        ]
        turns = [mark for _, mark, _ in sorted(marks) if mark in ("pass", "verify")]
        steps = len(turns) // 2
        assert {mark for _, mark, _ in marks} == phases and turns == ["pass", "verify"] * steps
        assert all(end <= start for (_, _, end), (start, _, _) in pairwise(sorted(marks)))
        # a picture has 16 codes, one of them the prefill's
        assert steps == 15 if name == "ar" else 0 < steps < 15


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--prompts", "absent.txt"), "absent.txt"),
        (("--prompts", "empty.txt"), "empty.txt"),
        ((), "--prompts FILE"),
        ((*PROMPTS, "-n", 3, "--batch-size", 2), "batches of 2"),
        ((*PROMPTS, "--reference", "nowhere"), "nowhere"),
        ((*PROMPTS, "--batch-sizes", "1,x"), "'1,x'"),
        ((*PROMPTS, "--batch-sizes", "0,2"), "'0,2'"),
        ((*PROMPTS, "--batch-sizes", "1", "--batch-size", 2), "--batch-sizes"),
        ((*PROMPTS, "--features", "inceptoin"), "did you mean 'inception'?"),
        ((*PROMPTS, "--quality", "--methods", "ar"), "has no classifier"),
        ((*PROMPTS, "--equal-tv", "much"), "'much' must be numbers"),
        ((*PROMPTS, "--equal-tv", "0.1,1"), "above 0 and below 1"),
        ((*PROMPTS, "--equal-tv", "0.1", "--fit"), "leave out --fit"),
        ((*PROMPTS, "--equal-tv", "0.1", "--batch-size", 3), "cannot be divided into batches of 3"),
        ((*PROMPTS, "--equal-tv", "0.1", "--methods", "eagle"), "has the rule 'exact'"),
        ((*PROMPTS, "--equal-tv", "0.1", "--methods", "ar"), "relaxed rules, and --methods names none"),
        ((*PROMPTS, "--drafter", "nature-128", "--methods", "ar"), "--drafter has no effect on ar;"),
        ((*PROMPTS, "--equal-tv", "0.1", "--methods", "lantern++ lambda=2"), "leave it out"),
        ((*PROMPTS, "--paper", "lantern++-anol"), "did you mean 'lantern++-anole'?"),
        ((*PROMPTS, "--paper", "sjd-lumina", "--equal-tv", "0.1"), "leave one out"),
        (("--pictures", "none"), "none is no folder"),
        ((*PROMPTS, "--equal-pictures", 4), "would change nothing without --equal-tv"),
        (("--pictures", "mine", "-n", 3, "--methods", "ar"), "draws nothing: leave out --n, --methods"),
        (("--pictures", "mine", "--seed", 1, "--resume", "--no-plots"), "--resume, --no-plots, --seed"),
        (("--pictures", "mine", "--no-quality", "--temperature", 0), "leave out --temperature, --no-quality"),
        ((*PROMPTS, "--no-quality", "--reference", "mine", "--clip", "absent"), "leave out --reference, --c"),
    ],
)
def test_wrong_options_are_rejected_before_anything_is_drawn(run, model, prompts, options, named):
    Path("empty.txt").write_text("\n# nothing\n")
    saved(Path("mine"), noisy_pictures("red", 3))
    run("bench", "--model", model, *options).refused(named)
    assert not Path("out/bench/strengths").exists()


def test_relaxed_rules_of_codes_are_not_raced_on_latents(run, prompts, tmp_path):
    options = "bench", *PROMPTS, "--model", write_diffusion(tmp_path), "-n", 1, "--no-plots"
    run(*options, "--equal-tv", "0.1").refused("--equal-tv is for models of codes")
    assert "draws latents, or lacks a network or codebook for them: " in run(*options).err


def test_too_few_pictures_are_rejected_with_a_reference_and_otherwise_only_timed(bench, own, tmp_path):
    quick = ("ar", "--no-plots", "--no-measure-tv", "-n")
    (tmp_path / "red").mkdir()
    bench(*quick, 1, "--reference", tmp_path / "red", of=own).refused("2 pictures of each method")
    assert not Path("b").exists()
    few, enough = (bench(*quick, n, "--json", of=own, to=f"b{n}").json["methods"][0] for n in (1, 2))
    assert "frechet" not in few
    assert enough["frechet"] > 0 and {"precision", "recall", "prompt_accuracy"} <= enough.keys()


def test_rules_race_at_strengths_of_equal_total_variation(bench, monkeypatch):
    monkeypatch.setattr(
        Pipeline, "fit", lambda pipe, settings: settings if not settings.fit else pytest.fail()
    )
    asked = ("eagle accept=mixture, lantern++ k=5", "--equal-tv", "0.05,0.01", "--equal-pictures", 2)
    asked += ("-n", 1, "--dtype", "float32", "--no-plots", "--json")
    plain, *rows = bench(*asked).json["methods"]
    assert plain["method"] == "ar"
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
    lines = Path("b/strengths/tv.jsonl").read_text()
    assert bench(*asked, "--resume").code == 0
    assert Path("b/strengths/tv.jsonl").read_text() == lines, "nothing is measured twice"


def test_methods_race_at_every_batch_size(bench):
    methods, options = "parallel tree=chain-3", ("-n", 2, "--dtype", "float32", "--no-measure-tv")
    reported = bench(methods, "--batch-sizes", "2,1", *options, "--json").json
    rows = reported["methods"]
    assert reported["n"] == 2
    assert [(row["batch_size"], row["method"], row["draft"]) for row in rows] == [
        (size, method, draft)
        for size in (1, 2)
        for method, draft in (("ar", "none"), (methods, "a chain of 3"))
    ]
    for row in rows:
        assert row["images"] == 2 * 2 * row["batch_size"], "twice as many as the batch has, each turn"
        assert row["pictures_per_second"] == pytest.approx(row["images"] / row["seconds"])
    table = Path("b/table.md").read_text()
    assert table.startswith("| method | batch | draft | pictures per s |")
    with Image.open("b/throughput.png") as image:
        assert image.width > 800
    bench("ar", "--batch-sizes", 4).refused("b/batch-1 holds a run already")
    bench("ar", "--resume").refused("holds a run with --batch-sizes")
    plots = list(Path("b").rglob("[a-z]*.png"))
    bench(methods, "--batch-sizes", "2,1", *options, "--seed", 1, "--resume").refused(
        "holds a run with other"
    )
    assert len(plots) > 2 and all(path.exists() for path in plots), "a refused command changes nothing"
    assert bench(methods, "--batch-sizes", "2,1", *options, "--resume", "--no-plots").code == 0
    assert not any(path.exists() for path in plots), "plots of the run before"
    Path("c").mkdir()
    Path("c/speed.png").touch()
    assert bench("ar", "-n", 1, "--no-plots", to="c").code == 0 and Path("c/speed.png").exists()
    bench("ar", "--batch-sizes", 1, "--resume", to="c").refused("holds a run without --batch-sizes")


def saved(folder: Path, images: list[Image.Image], **notes: str) -> Path:
    for i, image in enumerate(images):
        save_png(image, folder / f"{i:02d}.png", notes)
    return folder


def test_a_folder_of_pictures_is_measured_without_drawing(run, own, empty_dir, monkeypatch):
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda **_: pytest.fail("a model was read"))
    saved(empty_dir / "mine", noisy_pictures("red", 6), prompt="a red tulip")
    row = run("bench", "--pictures", "mine", "--model", own, "--json").json
    assert row["images"] == 6 and row["folder"] == "mine" and row["prompt_accuracy"] == 1
    assert row["features"] == "classifier" and row["reference_images"] == 24
    assert row["frechet"] >= 0 and 0 <= row["precision"] <= 1 and 0 <= row["recall"] <= 1
    saved(empty_dir / "photos/val", noisy_pictures("red", 6))
    table = run("bench", "--pictures", "mine", "--model", own, "--reference", "photos")
    assert table.code == 0 and "Fréchet" in table.out and "100 %" in table.out


def test_the_shipped_classifier_recognises_pictures_of_the_shipped_model(run, prompts):
    prompts.write_text("a photo of a sunflower under a blue sky\na photo of a forest\n")
    asked = ("--methods", "ar", "-n", 2, *PROMPTS, "--no-measure-tv", "--no-plots", "--json")
    (row,) = run("bench", *asked).json["methods"]
    assert row["prompt_accuracy"] >= 3 / 4 and row["frechet"] > 0 and row["precision"] > 0


def test_prompts_of_geneval_leave_pictures_for_its_scorer(run, model, empty_dir):
    rows = [{"tag": "", "include": [], "prompt": prompt} for prompt in ("a tulip", "a red tulip")]
    Path("g.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("--prompts", "g.jsonl", "--methods", "ar", "-n", 2, "--no-plots", "--no-measure-tv", "-o", "b")
    assert run("bench", "--model", model, *asked).code == 0
    for place, row in enumerate(rows):
        folder = Path(f"b/geneval/ar/{place:05d}")
        assert json.loads((folder / "metadata.jsonl").read_text()) == row
        drawn = sorted(Path("b/pictures/ar").glob(f"{place:03d}-*.png"))
        scored = sorted((folder / "samples").iterdir())
        assert [path.name for path in scored] == ["0000.png", "0001.png"]
        assert [path.read_bytes() for path in scored] == [path.read_bytes() for path in drawn]
