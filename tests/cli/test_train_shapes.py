"""Models of other shapes than the shipped one, trained and drawn with by commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from lanternpp.api.model import read_target

SMALL = ("--steps", 2, "--checks", 1, "--batch-size", 4, "--limit", 4)
BASE = ("--data", "photos", "--model", "mine")


def test_a_grid_that_is_larger_for_its_pixels_from_photos_to_a_picture(run, photos: Path) -> None:
    """4 pixels a code, and a side that is no power of two: 7 x 7 codes of 28 x 28 pixels."""
    made = run("train", "tokenizer", *BASE, "--size", 28, "--down", 4, "--codes", 64, *SMALL)
    assert made.code == 0, made.err
    shape = ("--dim", 32, "--layers", 1, "--heads", 2, "--hidden", 48)
    made = run("train", "target", *BASE, *shape, *SMALL)
    assert made.code == 0, made.err
    assert json.loads(Path("mine/target/config.json").read_text())["grid"] == 7
    window = ("--method", "jacobi-coupled", "--window", 3, "--alternatives", 1, "--window-rows", 3)
    drawn = run("generate", "a red tulip", "--model", "mine", *window, "--json")
    assert drawn.code == 0, drawn.err
    figures = json.loads(drawn.out)
    assert figures["settings"]["window_rows"] == 3 and figures["settings"]["verify"] == "traversal"
    assert sum(figures["accepted_per_pass"]) == 49
    refused = run("generate", "a red tulip", "--model", "mine", "--method", "jacobi", "--window-rows", 8)
    assert refused.code == 2 and "rows 8: the model's pictures have 7 rows" in refused.err
    # The same codes for larger pictures, and a target that begins with the smaller one's weights.
    larger = ("--data", "photos", "--model", "larger", *SMALL)
    made = run("train", "tokenizer", *larger, "--codes-of", "mine", "--size", 36, "--perceptual", 0)
    assert made.code == 0, made.err
    made = run("train", "target", *larger, *shape, "--weights-of", "mine", "--lr", 1e-9, "--muon-lr", 1e-9)
    assert made.code == 0, made.err
    tables = [read_target(Path(name), torch.float32).codes_in.table for name in ("mine", "larger")]
    assert torch.allclose(*tables, atol=1e-4), "the codes are not the same ones"
    drawn = run("generate", "a red tulip", "--model", "larger", "-o", "large.png", "--json")
    assert drawn.code == 0, drawn.err
    assert Image.open("large.png").size == (36, 36)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--down", 5), "5 pixels a code: a tokenizer has 4, 8, 16"),
        (("--size", 30, "--down", 4), "size 30 is not a multiple of 4"),
        (("--codes-of", "nature-128", "--down", 4), "--down and --codes are those of"),
        (("--codes-of", "nature-128", "--size", 100), "size 100 is not a multiple of 8"),
    ],
)
def test_shapes_that_no_tokenizer_has_are_refused(run, photos: Path, options, named) -> None:
    outcome = run("train", "tokenizer", *BASE, *options, *SMALL)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and named in outcome.err
