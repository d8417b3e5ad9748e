"""`lanternpp floor` and `lanternpp gpu-report` on tiny models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from lanternpp.cli import gpu_report
from lanternpp.evaluation import floor
from lanternpp.evaluation.speed import Race

SMALL = ("--steps", 2, "--device", "cpu", "--dtype", "float32")
REPORT = ("gpu-report", "--random", "tiny", "--batch-sizes", "1,2", "--rounds", 1, "--out", "d/gpu.md")
REPORT = (*REPORT, "--prompts", "p.txt", *SMALL)


@pytest.fixture(autouse=True)
def quick(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits measured on little tensors, and a prompt."""
    Path("p.txt").write_text("a red tulip\n")
    monkeypatch.setattr(floor, "BUFFER", 1 << 16)
    monkeypatch.setattr(floor, "SIDES", {"cpu": 64})


def test_the_floor_is_a_table_a_plot_and_one_object(run, model):
    requested = ("floor", "--model", model, "--batch-sizes", "1,2", *SMALL, "-o", "f")
    outcome = run(*requested, "--json")
    assert outcome.code == 0, outcome.err
    reported = json.loads(outcome.out)
    assert reported == json.loads(Path("f/floor.json").read_text())
    assert [(row["method"], row["batch_size"]) for row in reported["floors"]] == [
        (name, size) for size in (1, 2) for name in ("ar", "auto (lantern++)")
    ]
    assert reported["machine"]["dtype"] == "float32" and reported["limits"].keys() == {"bandwidth", "rate"}
    for row in reported["floors"]:
        assert row["ratio"] == pytest.approx(row["step"] / (row["linears"] + row["attention"]))
    table = Path("f/table.md").read_text().splitlines()
    assert len({line.count("|") for line in table[:6]}) == 1 and "`" not in table[0]
    assert "2 steps" in table[-1] and "float32" in table[-1]
    with Image.open("f/floor.png") as image:
        assert image.width > 400 and len(image.convert("L").getcolors()) > 8
    shown = run(*requested, "--no-plots", "--methods", "eagle tree=chain-2")
    assert shown.code == 0 and "eagle tree=chain-2" in shown.out and "f/table.md" in shown.out


def test_random_weights_of_a_size_need_no_model(run):
    outcome = run("floor", "--random", "tiny", *SMALL, "--no-plots", "--json", "--cfg", 7.5, "-o", "f")
    assert outcome.code == 0, outcome.err
    reported = json.loads(outcome.out)
    assert reported["model"] == "llamagen-tiny-random" and len(reported["floors"]) == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--batch-sizes", "1,x"), "'1,x'"),
        (("--batch-size", 2), "--batch-sizes"),
        (("--steps", 0), "--steps 0"),
        (("--methods", "warp"), "warp"),
        (("--methods", "eagle tree=oak"), "oak"),
        (("--random", "XXL"), "XXL"),
        (("--random", "tiny"), "--random"),
        (("--drafter", "nowhere"), "nowhere"),
    ],
)
def test_a_floor_that_cannot_be_measured_is_refused(run, model, options, named):
    outcome = run("floor", "--model", model, *SMALL, "-o", "f", *options)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and named in outcome.err
    assert not Path("f").exists()


def test_a_gpu_report_holds_the_tests_the_floors_and_the_races_of_both_models(run, model, monkeypatch):
    Path("tests").mkdir()
    Path("tests/test_one.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_one(): pass\ndef test_two(): assert False\n"
    )
    outcome = run(*REPORT, "--model", model)
    assert outcome.code == 0, outcome.err
    text = Path("d/gpu.md").read_text()
    assert [path.name for path in Path("d").iterdir()] == ["gpu.md"]
    assert "1 passed, 1 deselected" in text
    headings = re.findall(r"^#+ (.*)$", text, re.M)[1:]
    parts = ["The floor of a step", "Race, batch 1", "Race, batch 2"]
    assert headings == ["Tests", "tiny", *parts, "llamagen-tiny-random", *parts]
    for method in (
        "ar",
        "lantern++ proposer=tree tree=lantern-57",
        "eagle tree=eagle-25",
        "eagle tree=chain-4",
    ):
        assert text.count(f"\n| {method} |") == 2 * 2 and text.count(f"\n| `{method}` |") == 2 * 2
    Path("tests/test_one.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_one(): assert False\n")
    monkeypatch.setattr(gpu_report, "sections", lambda *_: [])
    failed = run(*REPORT, "--model", model)
    assert failed.code == 1 and "1 failed" in failed.err and "1 failed" in Path("d/gpu.md").read_text()


def test_a_gpu_report_is_written_whole_or_not_at_all(run, model, monkeypatch):
    race, raced = Race.run, []

    def interrupted(self, *given, **named):
        raced.append(self)
        if len(raced) == 3:
            raise KeyboardInterrupt
        return race(self, *given, **named)

    monkeypatch.setattr(Race, "run", interrupted)
    Path("d").mkdir()
    Path("d/gpu.md").write_text("an earlier one")
    outcome = run(*REPORT, "--model", model)
    assert outcome.code == 130 and len(raced) == 3
    assert Path("d/gpu.md").read_text() == "an earlier one" and len(list(Path("d").iterdir())) == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--batch-sizes", "0"), "'0'"),
        (("--random", "XXL"), "XXL"),
        (("--out", "."), "'.'"),
        (("--device", "tpu"), "tpu"),
        (("--rounds", 0), "--rounds 0"),
        (("--prompts", "absent.txt"), "absent.txt"),
    ],
)
def test_a_report_that_cannot_be_made_is_refused_at_once(run, model, monkeypatch, options, named):
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("tests were run"))
    outcome = run(*REPORT, "--model", model, *options)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and named in outcome.err
    assert not Path("d").exists()
