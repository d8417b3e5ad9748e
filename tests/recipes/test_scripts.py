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
BASE = ("--data", "../data", "--model", "mine", *SMALL)
LATENTS = ("--kind", "kl", "--size", 32, "--channels", 4)
DENOISER = ("--head", "diffusion", "--denoising-steps", 3, "--denoiser-width", 16, "--denoiser-blocks", 1)
DRAW = ("generate", "a red square", "--model")


def test_codes_from_photos_to_pictures_and_to_larger_ones(run, data: Path) -> None:
    """4 pixels a code, and a side that is no power of two: 7 x 7 codes of 28 x 28 pixels."""
    assert run("tokenizer", *BASE, "--size", 28, "--down", 4, "--codes", 64).code == 0
    assert run("target", *BASE, *SHAPE).code == 0
    assert json.loads(Path("mine/target/config.json").read_text())["grid"] == 7
    assert run("classifier", *BASE, "--redrawn", 2).code == 0
    assert Path("mine/classifier/reference.safetensors").is_file()
    window = ("--method", "jacobi-coupled", "--window", 3, "--alternatives", 1, "--window-rows", 3)
    figures = run(*DRAW, "mine", *window, "--json").json
    assert figures["settings"]["window_rows"] == 3 and figures["settings"]["verify"] == "traversal"
    assert sum(figures["accepted_per_pass"]) == 49
    rows = ("--method", "jacobi", "--window-rows", 8)
    run(*DRAW, "mine", *rows).refused("window_rows 8: the model's pictures have 7 rows")
    # The same codes for larger pictures, and a target that begins with the smaller one's weights.
    larger = ("--data", "../data", "--model", "larger", *SMALL)
    assert run("tokenizer", *larger, "--codes-of", "mine", "--size", 36, "--perceptual", 0).code == 0
    start = ("--weights-of", "mine", "--lr", 1e-9, "--muon-lr", 1e-9)
    assert run("target", *larger, *SHAPE, *start).code == 0
    tables = [read_target(Path(name), torch.float32).codes_in.weight for name in ("mine", "larger")]
    assert torch.allclose(*tables, atol=1e-4), "the codes are not the same ones"
    assert run(*DRAW, "larger", "-o", "large.png").code == 0
    assert Image.open("large.png").size == (36, 36)


@pytest.mark.parametrize("stage", ["tokenizer", "target", "classifier"])
def test_the_defaults_of_the_signature_are_those_in_the_help(stage: str, run) -> None:
    help = " ".join(run(stage, "--help").out.replace("│", "").split())
    usual = signature(import_module(stage).main).parameters["training"].default
    for name in ("checks", "store"):
        assert re.search(rf"--{name} (?:(?!--).)*\[default: {getattr(usual, name)}\]", help)


def test_a_stage_needs_a_budget_and_ends_with_status_130_when_stopped(run, data: Path, monkeypatch) -> None:
    run("tokenizer", "--data", "../data", "--model", "mine").refused("give --steps N, --minutes M or both")
    monkeypatch.setattr("tokenizer.run", lambda *_: False)
    assert run("tokenizer", *BASE, "--size", 28, "--down", 4, "--perceptual", 0).code == 130


@pytest.mark.parametrize("head", [("--head", "mixture", "--components", 3), DENOISER])
def test_latents_from_photos_to_a_comparison(head: tuple[object, ...], run, data: Path) -> None:
    train, rules = ("train", *BASE), ("exact", "cspd") if head is DENOISER else ("exact",)
    assert run("tokenizer", *BASE, *LATENTS, "--perceptual", 0, "--no-adversarial").code == 0
    run(*train).refused("run recipes/nature/target.py")
    assert run("target", *BASE, *head, *SHAPE).code == 0
    assert run(*DRAW, "mine", "--json").json["method"] == "ar"
    run(*train).refused("--kind eagle")
    done = run(*train, "--kind", "eagle")
    assert done.code == 0 and "counting how many drafted codes are accepted\n" in done.err, done.err
    assert not [path for path in done.made if path.name == "acceptance.json"]
    compare = ("compare", *DRAW[1:], "mine", "--runs", 1, "--cfg", 2, "--method", "eagle", "--json")
    for rule in rules:
        ar, eagle = run(*compare, "--accept", rule).json["methods"]
        assert (ar["passes"], eagle["method"], eagle["settings"]["tree"]) == (16, "eagle", "chain-4")
        assert eagle["codes"] == 16 and eagle["passes"] <= 16
    listed = run("models", "--model", "mine", "--json").json["methods"]
    assert {row["name"]: row["tree"] for row in listed if row["fits"]} == {"ar": None, "eagle": "chain-4"}
    for options, said in (
        (("--method", "eagle", "--tree", "eagle-25"), "chain"),
        (("--method", "eagle", "--verify", "block"), "--verify token"),
        (("--method", "jacobi-coupled"), "--method ar"),
        (("--method", "eagle", "--accept", "cool", "--delta", 1.5), "--accept exact"),
        (("--method", "lantern++"), "use a rule that needs none, such as exact"),
        (("--temperature", 0), "temperature 0"),
        (("--top-k", 5), "top-k 5"),
        (("--top-p", 0.9), "top-p 0.9"),
    ):
        run(*DRAW, "mine", *options).refused(said)


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
        ("tokenizer", ("--kind", "kl", "--channels", 0), "--channels 0 is out of range"),
        ("tokenizer", ("--kind", "kl", "--codes", 4), "--codes 4 is of tokenizers of --kind vq"),
        ("tokenizer", ("--lr", 2), "--lr 2.0 is out of range"),
        ("tokenizer", ("--minutes", -1), "--minutes -1.0 is out of range"),
        ("target", SHAPE, "holds no tokenizer: run recipes/nature/tokenizer.py"),
        ("target", ("--head", "diffusion", "--components", 3), "--components is for --head mixture"),
        ("target", ("--head", "mixture", "--components", 2048), "use 1 to 1024"),
        ("target", ("--head", "diffusion", "--denoising-steps", 1001), "use 1 to 1000"),
        ("target", ("--dim", 30), "dim 30 over 6 heads"),
        ("target", (*SHAPE, "--corrupt", 1.5), "--corrupt 1.5 is out of range"),
        ("classifier", (), "holds no tokenizer"),
    ],
)
def test_wrong_options_are_rejected(stage: str, options, named: str, run, data: Path) -> None:
    run(stage, *BASE, *options).refused(named)
