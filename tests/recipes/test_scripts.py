"""Every stage by its script, from photos to a picture, at toy size; and what a script rejects."""

from __future__ import annotations

import json
import re
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch
from PIL import Image

from lanternpp.api.model import read_target

SMALL = ("--steps", 2, "--checks", 1, "--batch-size", 4, "--limit", 4)
SHAPE = ("--dim", 32, "--layers", 1, "--heads", 2, "--hidden", 48)
BASE = ("--data", "data", "--model", "mine", *SMALL)
LATENTS = ("--kind", "kl", "--size", 32, "--channels", 4)
DENOISER = ("--head", "diffusion", "--denoising-steps", 3, "--denoiser-width", 16, "--denoiser-blocks", 1)


@pytest.fixture
def done(command, data: Path):
    """Runs a command that must end well: what it printed."""

    def run(*args: object) -> str:
        status, out, err = command(*args)
        assert status == 0, err
        return out

    return run


@pytest.fixture
def rejected(command, data: Path):
    """Runs a command that must end in one line: that line."""

    def run(*args: object) -> str:
        status, out, err = command(*args)
        assert (status, out) == (2, "") and err.splitlines()[-1].startswith("lanternpp: error: "), err
        return err.splitlines()[-1]

    return run


def test_codes_from_photos_to_a_picture_and_on_to_larger_ones(done, rejected) -> None:
    """4 pixels a code, and a side that is no power of two: 7 x 7 codes of 28 x 28 pixels."""
    done("tokenizer", *BASE, "--size", 28, "--down", 4, "--codes", 64, "--classifier-of", "nature-128")
    done("target", *BASE, *SHAPE)
    assert json.loads(Path("mine/target/config.json").read_text())["grid"] == 7
    done("classifier", *BASE, "--redrawn", 2)
    assert Path("mine/classifier/reference.safetensors").is_file()
    window = ("--method", "jacobi-coupled", "--window", 3, "--alternatives", 1, "--window-rows", 3)
    draw = ("lanternpp", "generate", "a red square", "--model")
    figures = json.loads(done(*draw, "mine", *window, "--json"))
    assert figures["settings"]["window_rows"] == 3 and figures["settings"]["verify"] == "traversal"
    assert sum(figures["accepted_per_pass"]) == 49
    assert "window_rows 8: the model's pictures have 7 rows" in rejected(
        *draw, "mine", "--method", "jacobi", "--window-rows", 8
    )
    # The same codes for larger pictures, and a target that begins with the smaller one's weights.
    larger = ("--data", "data", "--model", "larger", *SMALL)
    done("tokenizer", *larger, "--codes-of", "mine", "--size", 36, "--perceptual", 0)
    done("target", *larger, *SHAPE, "--weights-of", "mine", "--lr", 1e-9, "--muon-lr", 1e-9)
    tables = [read_target(Path(name), torch.float32).codes_in.weight for name in ("mine", "larger")]
    assert torch.allclose(*tables, atol=1e-4), "the codes are not the same ones"
    done(*draw, "larger", "-o", "large.png", "--json")
    assert Image.open("large.png").size == (36, 36)


@pytest.mark.parametrize("stage", ["tokenizer", "target", "classifier"])
def test_the_defaults_of_the_signature_are_those_in_the_help(stage: str, done) -> None:
    help = " ".join(done(stage, "--help").replace("│", "").split())
    usual = signature(import_module(stage).main).parameters["training"].default
    for name in ("checks", "store"):
        assert re.search(rf"--{name} (?:(?!--).)*\[default: {getattr(usual, name)}\]", help)


@pytest.mark.parametrize("head", [("--head", "mixture", "--components", 3), DENOISER])
def test_latents_from_photos_to_a_comparison(
    head: tuple[object, ...], command, done, rejected, tmp_path: Path
) -> None:
    train = ("lanternpp", "train", *BASE)
    done("tokenizer", *BASE, *LATENTS, "--perceptual", 0, "--no-adversarial")
    assert "run recipes/nature/target.py" in rejected(*train)
    done("target", *BASE, *head, *SHAPE)
    draw = ("a red square", "--model", "mine")
    assert json.loads(done("lanternpp", "generate", *draw, "--json"))["method"] == "ar"
    assert "--kind eagle" in rejected(*train)
    status, _, said = command(*train, "--kind", "eagle")
    assert status == 0 and "counting how many drafted codes are accepted\n" in said, said
    assert not list(tmp_path.rglob("acceptance.json"))
    rules = ("exact", "cspd") if head is DENOISER else ("exact",)
    for rule in rules:
        dials = ("--runs", 1, "--cfg", 2, "--method", "eagle", "--accept", rule)
        ar, eagle = json.loads(done("lanternpp", "compare", *draw, *dials, "--json"))["methods"]
        assert (ar["passes"], eagle["method"], eagle["settings"]["tree"]) == (16, "eagle", "chain-4")
        assert eagle["codes"] == 16 and eagle["passes"] <= 16
    listed = json.loads(done("lanternpp", "models", "--model", "mine", "--json"))["methods"]
    assert {row["name"]: row["tree"] for row in listed if row["fits"]} == {"ar": None, "eagle": "chain-4"}
    for options, said in (
        (("--method", "eagle", "--tree", "eagle-25"), "chain"),
        (("--method", "eagle", "--verify", "block"), "--verify token"),
        (("--method", "jacobi-coupled"), "--method ar"),
        (("--method", "eagle", "--accept", "cool", "--delta", 1.5), "--accept exact"),
        (("--method", "lantern++"), f"use the rule {' or '.join(rules)}"),
        (("--temperature", 0), "temperature 0"),
        (("--top-k", 5), "top-k 5"),
        (("--top-p", 0.9), "top-p 0.9"),
    ):
        assert said in rejected("lanternpp", "generate", *draw, *options), options


@pytest.mark.parametrize(
    ("stage", "options", "named"),
    [
        ("tokenizer", ("--down", 5), "--down"),
        ("tokenizer", ("--size", 30, "--down", 4), "size 30 is not a multiple of 4"),
        ("tokenizer", ("--size", 0), "--size 0 is out of range"),
        ("tokenizer", ("--codes", 0), "--codes 0 is out of range"),
        (
            "tokenizer",
            ("--codes-of", "nature-128", "--down", 4),
            "leave --kind, --down, --codes and --weights-of out",
        ),
        ("tokenizer", ("--channels", 4), "--channels 4 is of tokenizers of --kind kl"),
        ("tokenizer", ("--kind", "kl", "--codes", 4), "--codes 4 is of tokenizers of --kind vq"),
        ("tokenizer", ("--lr", 2), "--lr 2.0 is out of range"),
        ("target", SHAPE, "holds no tokenizer: run recipes/nature/tokenizer.py"),
        ("target", ("--head", "diffusion", "--components", 3), "--components 3 is of --head mixture"),
        (
            "target",
            ("--head", "mixture", "--denoising-steps", 3),
            "--denoising-steps 3 is of --head diffusion",
        ),
        ("target", ("--dim", 30), "dim 30 over 6 heads"),
        ("target", (*SHAPE, "--corrupt", 1.5), "--corrupt 1.5 is out of range"),
        ("classifier", (), "holds no tokenizer"),
    ],
)
def test_what_no_stage_can_do_is_one_sentence(stage: str, options, named: str, rejected) -> None:
    assert named in rejected(stage, *BASE, *options)
