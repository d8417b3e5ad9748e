"""The command line on tiny checkpoints of Anole, Lumina-mGPT, Janus and Emu3, as published and converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.families import (
    LANGUAGE,
    write_chameleon,
    write_emu3,
    write_glm_image,
    write_glm_processor,
    write_janus,
)
from PIL import Image

from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.nn import checkpoints
from lanternpp.nn.decoder import DecoderConfig
from lanternpp.nn.rope import line_table

PROMPT = "a photo of the red tulip"
SIZES = {"anole": (64, 64), "Lumina-mGPT-7B-64": (64, 64), "janus": (64, 64), "emu3": (32, 32)}
every_family = pytest.mark.parametrize("name", SIZES)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each, and a random drafter of their width."""
    place = tmp_path_factory.mktemp("published")
    write_chameleon(place / "anole")
    write_chameleon(place / "Lumina-mGPT-7B-64", lumina=True)
    write_janus(place / "janus")
    write_emu3(place / "emu3")
    shape = EagleConfig.like(DecoderConfig(LANGUAGE["hidden_size"], 1, LANGUAGE["num_attention_heads"], 48))
    torch.manual_seed(1)
    drafter = EagleDrafter(shape, line_table(8, 8))
    checkpoints.save(place / "drafter", {"kind": "eagle", **shape.flat()}, drafter.state_dict())
    return place


@every_family
def test_a_published_folder_is_compared_and_its_size_drawn(name: str, run, models: Path) -> None:
    done = run(
        *(
            "compare",
            PROMPT,
            "--model",
            models / name,
            "--drafter",
            models / "drafter",
            "--json",
            "--runs",
            1,
        ),
        *("--method", "lantern++", "--neighbours", 8, "-n", 2),
    )
    assert (done.code, done.err) == (0, "")
    figures = json.loads(done.out)
    assert [side["method"] for side in figures["methods"]] == ["ar", "lantern++"]
    assert figures["settings"]["cfg"] > 1


@every_family
def test_a_converted_folder_draws_the_same_picture(name: str, run, models: Path, tmp_path: Path) -> None:
    out = tmp_path / "ours"
    done = run("models", "convert", models / name, out, "--store", "float32")
    assert (done.code, done.err) == (0, "") and "target" in done.out
    refused = run("models", "convert", models / name, tmp_path / "small", "--store", "int8")
    assert refused.code == 2 and "float32 or bfloat16, not int8" in refused.err
    pictures = []
    for model in (models / name, out):
        file = tmp_path / f"{model.name}.png"
        args = ("--model", model, "--method", "ar", "--dtype", "float32", "-o", file, "--json")
        done = run("generate", PROMPT, *args)
        assert (done.code, done.err) == (0, "")
        pictures.append(Image.open(file))
    assert pictures[0].size == SIZES[name]
    assert pictures[0].tobytes() == pictures[1].tobytes()


def test_a_size_is_an_option_of_models_that_draw_several(
    run, models: Path, model: Path, tmp_path: Path
) -> None:
    for name, size in (("Lumina-mGPT-7B-64", "96x32"), ("emu3", "24x16")):
        args = ("--model", models / name, "--method", "jacobi", "-o", tmp_path / "wide.png")
        assert run("generate", PROMPT, *args, "--size", size).code == 0
        assert "{}x{}".format(*Image.open(tmp_path / "wide.png").size) == size
    refused = run("generate", PROMPT, "--model", models / "anole", "--method", "ar", "--size", "32x32")
    assert refused.code == 2 and "64x64 pixels alone" in refused.err and refused.err.count("\n") == 1
    for one_size in (model, models / "janus"):
        refused = run("generate", PROMPT, "--model", one_size, "--method", "ar", "--size", "32x32")
        assert refused.code == 2 and "one size; leave out --size 32x32" in refused.err
    done = run("models", "convert", models / "emu3", tmp_path / "wide", "--size", "24x16")
    assert (done.code, done.err) == (0, "")
    assert json.loads((tmp_path / "wide/target/config.json").read_text())["size"] == "24x16"


def test_verbs_that_write_pictures_refuse_a_model_whose_codes_cannot_become_one(run, tmp_path: Path) -> None:
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
