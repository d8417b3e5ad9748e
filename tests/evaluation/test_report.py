"""The figures of a race, worked out by hand."""

from __future__ import annotations

import csv
import math
from dataclasses import asdict

import pytest

from lanternpp.api.settings import resolve
from lanternpp.evaluation import report
from lanternpp.evaluation.race import Turn

PLAIN = asdict(resolve("ar", {}, {"batch_size": 1, "compile": False}))
RUN = {
    "model": "toy",
    "prompts": ["a", "b"],
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "versions": {"torch": "0"},
    "methods": {"ar": PLAIN, "fast": PLAIN},
}


def turn(label: str, prompt: int, seconds: float, accepted: list[list[int]], **more) -> Turn:
    shares = {"draft": 0.25, "pass": 0.5, "verify": 0.125, "rest": 0.125}
    parts = {phase: share * seconds for phase, share in shares.items()}
    return Turn(label, prompt, 0, seconds, parts, accepted, [], **more)


TURNS = [
    turn("ar", 0, 4.0, [[1] * 8]),
    turn("ar", 1, 2.0, [[1] * 8]),
    turn("ar", 2, 3.0, [[1] * 8]),
    turn("fast", 0, 1.0, [[1, 3, 4]], tv_cost=[0.5]),
    turn("fast", 1, 2.0, [[1, 1, 2, 4]], tv_cost=[1.5]),
    turn("fast", 2, 1.5, [[1, 5, 2]]),
]


def test_the_figures_of_a_row_are_those_of_its_turns() -> None:
    plain, fast = report.rows(TURNS, RUN, {"fast": {"frechet": 7.0}})
    assert plain["speedup"] == 1 and plain["seconds_per_image"] == 3
    assert fast["seconds_per_image"] == 1.5 and fast["speedup"] == 2  # medians: 3 s over 1.5 s
    assert fast["codes_per_pass"] == pytest.approx(24 / 10)
    assert fast["efficiency"] == pytest.approx(2 / 2.4)
    assert fast["histogram"] == {1: 4, 2: 2, 3: 1, 4: 2, 5: 1}
    assert fast["tv_cost"] == 1.0 and fast["tv_cost_images"] == 2
    assert fast["phases"] == pytest.approx({"draft": 0.25, "pass": 0.5, "verify": 0.125, "rest": 0.125})
    assert fast["frechet"] == 7.0 and "frechet" not in plain


def test_the_columns_of_papers_are_means_over_pictures_without_the_prefill() -> None:
    slow = turn("fast", 3, 5.5, [[1, 7]])
    table = report.rows([*TURNS, turn("ar", 3, 7.0, [[1] * 8]), slow], RUN, {"fast": {"clip": 30.0}})
    plain, fast = table
    assert plain["latency"] == 4 and plain["step_compression"] == plain["latency_speedup"] == 1
    # 10 s of four pictures; 7 codes after the prefill's in 2, 3, 2 and 1 passes
    assert fast["latency"] == 2.5 and fast["latency_speedup"] == pytest.approx(1.6)
    assert fast["step_compression"] == pytest.approx((3.5 + 7 / 3 + 3.5 + 7) / 4)
    lines = report.markdown(table, RUN, report.PAPER).splitlines()
    assert lines[0] == "| method | latency, s | speed-up | step compression | CLIP |"
    assert lines[3] == "| `fast` | 2.50 | 1.60x | 4.08x | 30.00 |"
    assert "means over pictures" in lines[-1] and "TV" not in lines[-1]
    rows = list(csv.DictReader(report.comma_separated(table, report.PAPER).splitlines()))
    assert [row["method"] for row in rows] == ["ar", "fast"] and rows[0]["clip"] == ""
    assert float(rows[1]["step_compression"]) == fast["step_compression"]
    assert "batch_size" in report.columns([plain, fast | {"batch_size": 4}], report.PAPER)


def test_codes_per_pass_count_in_the_row_where_the_pass_began() -> None:
    rows = report.by_row([turn("fast", 0, 1.0, [[1, 2, 4, 1], [1, 1, 1, 5]])], width=4)
    # row 0: passes at 1 (2 codes), 3 (4), 1 (1), 2 (1), 3 (5); row 1: at 7 (1)
    assert rows == {"fast": [pytest.approx(13 / 5), 1]}
    # a pass over all of row 1
    rows = report.by_row([turn("fast", 0, 1.0, [[1, 9, 2]])], width=4)
    assert rows == {"fast": pytest.approx([9, math.nan, 2], nan_ok=True)}


def test_the_table_shows_what_was_measured_and_dashes_elsewhere() -> None:
    table = report.rows(TURNS, RUN, {"fast": {"frechet": 7.0, "frechet_spread": 0.5}})
    lines = report.markdown(table, RUN).splitlines()
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    assert "Fréchet" in lines[0] and "CLIP" not in lines[0]
    assert "| - |" in lines[2] and "7.00 ± 0.50" in lines[3] and "2.00x" in lines[3]
    assert "3 pictures of 2 prompts" in lines[-1] and ", 1 thread," in lines[-1]
    alone = report.markdown(report.rows([TURNS[0], TURNS[3]], RUN, {}), RUN | {"prompts": ["a"]})
    assert "1 picture of 1 prompt per" in alone and "mean of 1 picture." in alone


def test_the_table_has_the_drafts_that_were_fitted() -> None:
    fast = PLAIN | {"fit": True}
    methods = {"ar": PLAIN, "fast": fast | {"tree": "chain-7"}, "slow": fast | {"tree": None}}
    turns = [*TURNS, turn("slow", 0, 1.0, [[1] * 8])]
    for names in (report.OURS, report.PAPER):
        table = report.rows(turns, RUN | {"methods": methods}, {})
        lines = report.markdown(table, RUN, names).splitlines()
        cells = [line.split(" | ")[1] for line in lines[:1] + lines[2:5]]
        assert cells == ["draft", "none", "a chain of 7, fitted", "none, fitted"]
