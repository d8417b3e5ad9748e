"""`lanternpp eval`, on a tiny model with a tiny classifier, and on the shipped one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.classifiers import splashes, write_classifier
from PIL import Image

from lanternpp import Pipeline
from lanternpp.api.model import ASSETS
from lanternpp.api.picture import save_png
from lanternpp.evaluation.draw import evaluation_requests

DRAW = ("-n", 6, "--batch-size", 3)


@pytest.fixture(scope="module")
def measured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a classifier."""
    folder = tmp_path_factory.mktemp("measured") / "tiny"
    shutil.copytree(model, folder)
    return write_classifier(folder)


def saved(folder: Path, images: list[Image.Image], **notes: str) -> Path:
    for i, image in enumerate(images):
        save_png(image, folder / f"{i:02d}.png", notes)
    return folder


def test_a_folder_of_pictures(run, measured, elsewhere: Path) -> None:
    saved(elsewhere / "mine", splashes("red", 6), prompt="a red tulip")
    outcome = run("eval", "mine", "--model", measured, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    row = json.loads(outcome.out)
    assert row["images"] == 6 and row["folder"] == "mine" and row["prompt_accuracy"] == 1
    assert row["features"] == "classifier" and row["reference_images"] == 24
    assert row["frechet"] >= 0 and 0 <= row["precision"] <= 1 and 0 <= row["recall"] <= 1
    table = run("eval", "mine", "--model", measured)
    assert table.code == 0 and "Fréchet distance" in table.out and "100.0 %" in table.out


def test_a_reference_folder_of_the_same_pictures_is_at_no_distance(run, measured, elsewhere: Path) -> None:
    for name in ("mine", "photos/val"):
        saved(elsewhere / name, splashes("blue", 6))
    row = json.loads(run("eval", "mine", "--model", measured, "--reference", "photos", "--json").out)
    assert row["frechet"] == pytest.approx(0, abs=1e-6) and row["precision"] == row["recall"] == 1
    assert row["reference"] == "photos/val" and "prompt_accuracy" not in row


def test_a_method_is_drawn_kept_and_measured(run, measured, elsewhere: Path) -> None:
    outcome = run("eval", "lantern++", "--model", measured, *DRAW, "--seed", 5, "-o", "kept", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    row = json.loads(outcome.out)
    assert row["method"] == "lantern++" and row["images"] == 6 and row["codes"] == 6 * 16
    assert row["settings"]["batch_size"] == 3 and row["codes_per_pass"] == row["codes"] / row["passes"]
    files = sorted((elsewhere / "kept").iterdir())
    with Image.open(files[2]) as image:
        assert image.text["prompt"] == "a red tulip" and image.text["seed"] == "7"  # the captions' prompt
    again = json.loads(run("eval", "kept", "--model", measured, "--json").out)
    for figure in ("frechet", "precision", "recall", "prompt_accuracy"):
        assert again[figure] == pytest.approx(row[figure]), figure


def test_prompts_of_a_file_are_taken_in_turn(run, measured, elsewhere: Path) -> None:
    (elsewhere / "prompts.txt").write_text("a tulip\n\na red tulip\n")
    arguments = ("--model", measured, "--prompts", "prompts.txt", "-o", "kept")
    assert run("eval", "ar", *arguments, "-n", 5).code == 0
    reported = [Image.open(path).text for path in sorted((elsewhere / "kept").iterdir())]
    pairs = [(text["prompt"], text["seed"]) for text in reported]
    assert pairs == [
        ("a tulip", "0"),
        ("a red tulip", "1"),
        ("a tulip", "2"),
        ("a red tulip", "3"),
        ("a tulip", "4"),
    ]


def test_a_kept_picture_is_the_one_that_generate_draws(run, measured, elsewhere: Path) -> None:
    assert run("eval", "ar", "--model", measured, "-n", 4, "--batch-size", 1, "-o", "kept").code == 0
    generate = ("generate", "a red tulip", "--method", "ar", "--model", measured)
    assert run(*generate, "--seed", 2, "-o", "two.png").code == 0
    one, two = (Image.open(elsewhere / name).tobytes() for name in ("kept/00002.png", "two.png"))
    assert one == two


def test_more_prompts_than_pictures_are_spread_evenly() -> None:
    prompts = [f"p{i}" for i in range(10)]
    assert [order.prompt for order in evaluation_requests(prompts, 5, 0)] == ["p0", "p2", "p4", "p6", "p8"]


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["lanten++"], "did you mean 'lantern++'? known: "),
        (["none"], "or give a folder of pictures"),
        (["mine", "-n", "4"], "-n is for drawing, and mine is a folder"),
        (["mine", "--lambda", "2"], "--lambda is for drawing"),
        (["mine", "-o", "x"], "--output is for drawing"),
        (["ar", "-n", "3"], "--n 3 is out of range; use 4 or more"),
        (["ar", "-o", "mine"], "'mine' is not empty"),
        (["ar", "--prompts", "none.txt"], "none.txt"),
        (["lantern", "--lambda", "2"], "lambda 2.0 would change nothing"),
        (["ar", "--features", "inceptoin"], "did you mean 'inception'?"),
        (["ar", "--reference", "none"], "none is no folder"),
        (["ar", "--model", "nature-12"], "'nature-12'"),
        (["mine"], "holds 3 pictures; at least 4 are needed"),
        ([], "IMAGES|METHOD"),
    ],
    ids=lambda v: " ".join(v)[-24:],
)
def test_refused_before_anything_is_drawn(args, names, run, measured, elsewhere, monkeypatch) -> None:
    saved(elsewhere / "mine", splashes("red", 3))
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda **_: pytest.fail("a model was read"))
    args = args if "--model" in args else [*args, "--model", measured]
    outcome = run("eval", *args)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("lanternpp: error: ") and outcome.err.count("\n") == 1
    assert names in outcome.err
    assert [path.name for path in elsewhere.iterdir()] == ["mine"]


def test_a_model_without_a_classifier_says_so_in_one_sentence(run, model, elsewhere: Path) -> None:
    outcome = run("eval", "ar", "--model", model)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and "has no classifier" in outcome.err


@pytest.mark.skipif(
    not (ASSETS / "nature-128" / "classifier").is_dir(), reason="this checkout holds no classifier"
)
def test_the_shipped_classifier_knows_what_the_shipped_model_drew(run, elsewhere: Path) -> None:
    prompts = (
        "a photo of a sunflower under a blue sky",
        "a photo of the sea at sunset",
        "a photo of a forest",
    )
    (elsewhere / "prompts.txt").write_text("\n".join(prompts))
    outcome = run("eval", "lantern++", "-n", 6, "--prompts", "prompts.txt", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    row = json.loads(outcome.out)
    assert row["prompt_accuracy"] >= 4 / 6 and row["reference_images"] == 908
    assert row["frechet"] > 0 and row["precision"] > 0
