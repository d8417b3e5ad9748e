"""`lanternpp gpu-report` on tiny models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lanternpp.cli import gpu_report
from lanternpp.evaluation.speed import Race

REPORT = ("gpu-report", "--random", "tiny", "--batch-sizes", "1,2", "--rounds", 1, "--out", "d/gpu.md")
REPORT = (*REPORT, "--prompts", "p.txt", "--device", "cpu", "--dtype", "float32")


@pytest.fixture(autouse=True)
def prompts(elsewhere: Path) -> None:
    """A file of one prompt."""
    (elsewhere / "p.txt").write_text("a red tulip\n")


def test_a_gpu_report_holds_the_tests_and_the_races_and_profiles_of_both_models(run, model, monkeypatch):
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
    parts = [f"{part}, batch {size}" for size in (1, 2) for part in ("Race", "Steps")]
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
