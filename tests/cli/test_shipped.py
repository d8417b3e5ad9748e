"""The command line on the model that ships in the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from lanternpp.api.model import ASSETS

pytestmark = pytest.mark.skipif(
    not (ASSETS / "nature-128" / "target").is_dir(), reason="this checkout holds no nature-128"
)


def test_generate_by_default(run, elsewhere: Path) -> None:
    for name in ("one.png", "two.png"):
        outcome = run("generate", "a photo of a red tulip", "-o", name, "--json")
        assert (outcome.code, outcome.err) == (0, "")
    stats = json.loads(outcome.out)
    assert stats["model"] == "nature-128" and stats["codes"] == 256 and stats["codes_per_pass"] > 1.5
    assert (elsewhere / "one.png").read_bytes() == (elsewhere / "two.png").read_bytes()
    with Image.open(elsewhere / "one.png") as image:
        assert image.size == (128, 128)


def test_compare_by_default(run, elsewhere: Path) -> None:
    outcome = run("compare", "a photo of a sunflower under a blue sky", "--runs", 1, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    figures = json.loads(outcome.out)
    assert figures["codes_per_pass"] > 1.5 and figures["methods"][0]["passes"] == 256
    assert (elsewhere / "out" / "compare.png").is_file()


def test_models_says_it_is_here(run) -> None:
    rows = json.loads(run("models", "--json").out)["models"]
    assert next(row for row in rows if row["name"] == "nature-128")["bytes"] > 1e6


def test_an_unknown_subject_lists_the_known_ones(run) -> None:
    outcome = run("generate", "a photo of a bicycle")
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and "tulip" in outcome.err
