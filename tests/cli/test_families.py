"""The command line on tiny checkpoints of published families: drawing, conversion, sizes, and what is rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import checkpoints
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
    small = ("models", "convert", models / name, tmp_path / "small", "--store", "int8", "--vq", "lamp/absent")
    run(*small).refused("float32 or bfloat16, not int8")
    run(*small[:4], "--text", tmp_path).refused("no use for --text;")
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


def test_wrong_checkpoints_of_llamagen_are_rejected(run, tmp_path: Path) -> None:
    folder = checkpoints.write_llamagen(tmp_path / "m")
    draw = ("generate", "7", "--model", folder, "--method", "ar")
    run("generate", "a cat", *draw[2:]).refused("'a cat'", "0 to 9")
    drafter = ("--method", "lantern++", "--drafter", folder / "t2i_XL_tiny.pt")
    run(*draw[:4], *drafter).refused("no drafter known here")
    (folder / "config.json").unlink()
    run(*draw).refused("t2i_XL_tiny.pt", "256, 384 or 512")
    (folder / "config.json").write_text('{"block_size": 16}')
    tensors, name = checkpoints.vq16(), "quantize.embedding.weight"
    torch.save({"model": tensors | {name: tensors[name][:20].clone()}}, folder / "vq_ds16.pt")
    run(*draw).refused("48 codes", "has 20")
    (folder / "vq_ds16.pt").unlink()
    run(*draw).refused("no image tokenizer", "vq_ds16_c2i.pt")
    whole = (folder / "t2i_XL_tiny.pt").read_bytes()
    (folder / "t2i_XL_tiny.pt").write_bytes(whole[: len(whole) // 2])
    run(*draw).refused("t2i_XL_tiny.pt is truncated")
    torch.save({"model.embed_tokens.weight": torch.ones(4, 4)}, folder / "t2i_XL_tiny.pt")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    run(*draw).refused("no model family known here", "'llama'", "LlamaGen's .pt files")


def test_without_its_encoder_a_text_is_rejected_unless_its_features_are_stored(run, tmp_path: Path) -> None:
    folder = checkpoints.write_llamagen(tmp_path / "m", text=True)
    (folder / "flan-t5-xl" / "model.safetensors").unlink()
    draw = ("--model", folder, "--method", "ar", "--json")
    run("generate", "a red tulip", *draw).refused("text encoder", "text/", "embeddings.safetensors")
    features = {"a red tulip": checkpoints.numbers("x", (4, 24)), "long": checkpoints.numbers("y", (4, 7))}
    checkpoints.save_file(features, folder / "embeddings.safetensors")
    assert run("generate", "a red tulip", *draw).json["codes"] == 16
    run("generate", "long", *draw).refused("(4, 7)", "google/flan-t5-xl")
