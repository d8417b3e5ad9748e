"""The command line on tiny checkpoints of Anole, Lumina-mGPT, Janus, Emu3, Liquid and SimpleAR, as published and converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.families import EVERY, PIXELS, with_drafters, write_glm_image, write_glm_processor
from helpers.models import contents
from PIL import Image

PROMPT = "a photo of the red tulip"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each."""
    place = tmp_path_factory.mktemp("published")
    for name, write in EVERY.items():
        write(place / name)
    return place


def test_a_given_picture_is_edited(run, models: Path, tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    Image.new("RGB", (80, 48), "red").save(photo)
    draw = ("generate", PROMPT, "--model", models / "emu3.5", "--method", "ar", "--json")
    plain, edited = (run(*draw, *shown).json["file"] for shown in ((), ("--image", photo)))
    assert plain != edited
    assert Image.open(plain).tobytes() != Image.open(edited).tobytes()
    assert run(*draw, "--image", photo).json["file"] == edited
    run(*draw, "--image", tmp_path / "none.png").refused("none.png cannot be read")
    run("generate", PROMPT, "--model", models / "janus", "--image", photo).refused("draws from text alone")


@pytest.mark.parametrize("name", EVERY)
def test_a_converted_folder_draws_the_same_picture_and_is_converted_with_its_drafters(
    name: str, run, models: Path, tmp_path: Path
) -> None:
    def drawn(model: Path, *options: object) -> Image.Image:
        return Image.open(run("generate", PROMPT, "--model", model, *options, "--json").json["file"])

    ours, again = tmp_path / "ours", tmp_path / "again"
    done = run("models", "convert", models / name, ours, "--store", "float32")
    assert (done.code, done.err) == (0, "") and "target" in done.out
    small = ("models", "convert", models / name, tmp_path / "small", "--store", "int8")
    run(*small).refused("float32 or bfloat16, not int8")
    one, other = (drawn(m, "--method", "ar", "--dtype", "float32") for m in (models / name, ours))
    assert one.size == (4 * PIXELS[name],) * 2 and one.tobytes() == other.tobytes()
    with_drafters(ours)
    settings = {"methods": {"ar": {"cfg": 2.0}}}
    (ours / "defaults.json").write_text(json.dumps(settings))
    done = run("models", "convert", ours, again)
    assert (done.code, done.err) == (0, "") and "bfloat16" in done.out
    assert contents(ours).keys() == contents(again).keys()
    assert json.loads((again / "defaults.json").read_text()) == settings
    assert json.loads((again / "target/provenance.json").read_text())["converted from"] == name
    one, other = (drawn(m, "--method", "parallel", "--dtype", "bfloat16") for m in (ours, again))
    assert one.tobytes() == other.tobytes()


def test_a_size_is_an_option_of_models_that_draw_several(
    run, models: Path, model: Path, tmp_path: Path
) -> None:
    for name, size in (("Lumina-mGPT-7B-64", "96x32"), ("emu3", "24x16")):
        args = ("--model", models / name, "--method", "jacobi", "-o", tmp_path / "wide.png")
        assert run("generate", PROMPT, *args, "--size", size).code == 0
        assert "{}x{}".format(*Image.open(tmp_path / "wide.png").size) == size
    alone, one_size = "squares of 64 pixels", "one size; leave out --size 32x32"
    for other, said in ((models / "anole", alone), (model, one_size), (models / "janus", one_size)):
        run("generate", PROMPT, "--model", other, "--method", "ar", "--size", "32x32").refused(said)
    done = run("models", "convert", models / "emu3", tmp_path / "wide", "--size", "24x16")
    assert (done.code, done.err) == (0, "")
    assert json.loads((tmp_path / "wide/target/config.json").read_text())["size"] == "24x16"


def test_verbs_that_write_pictures_reject_a_model_without_pixels(run, tmp_path: Path) -> None:
    write_glm_image(tmp_path / "glm" / "vision_language_encoder", positions=2048)
    write_glm_processor(tmp_path / "glm" / "processor")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("red sea\n")
    for verb in (
        ["generate", "red sea"],
        ["bench", "--prompts", prompts],
        ["generate", "--prompts", prompts, "-o", "many"],
        ["serve", "--port", 0],
    ):
        done = run(*verb, "--model", tmp_path / "glm")
        assert (done.code, done.out) == (2, "") and 'draw with output_type="codes"' in done.err, verb
    assert not list(Path().rglob("*"))
