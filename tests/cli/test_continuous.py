"""The command line on a model of continuous latents: trained, drawn, compared, and refused what is of codes."""

import json
from pathlib import Path

SMALL = ("--steps", 2, "--checks", 1, "--batch-size", 4, "--limit", 4)


def test_a_model_of_latents_from_photos_to_a_comparison(run, photos: Path) -> None:
    base = ("--data", "photos", "--model", "mine")
    shape = ("--dim", 32, "--layers", 1, "--heads", 2, "--hidden", 48)
    assert run("train", "tokenizer", *base, "--kind", "kl", "--size", 32, "--channels", 4, *SMALL).code == 0
    wrong = run("train", "target", *base, *shape, *SMALL)
    assert wrong.code == 2 and "--head mixture" in wrong.err
    done = run("train", "target", *base, "--head", "mixture", "--components", 3, *shape, *SMALL)
    assert done.code == 0, done.err
    draw = ("a red tulip", "--model", "mine")
    plain = run("generate", *draw, "--json")
    assert plain.code == 0, plain.err
    assert json.loads(plain.out)["method"] == "ar"
    refused = run("train", "drafter", *base, "--kind", "parallel", *SMALL)
    assert refused.code == 2 and "--kind eagle" in refused.err
    done = run("train", "drafter", *base, *SMALL)
    assert done.code == 0, done.err
    compared = run("compare", *draw, "--runs", 1, "--cfg", 2, "--temperature", 0.9, "--json")
    assert compared.code == 0, compared.err
    ar, eagle = json.loads(compared.out)["methods"]
    assert (ar["passes"], eagle["method"], eagle["settings"]["tree"]) == (16, "eagle", "chain-4")
    assert eagle["codes"] == 16 and eagle["passes"] <= 16

    listed = {
        row["name"]: row for row in json.loads(run("models", "--model", "mine", "--json").out)["methods"]
    }
    assert [name for name in listed if listed[name]["fits"]] == ["ar", "eagle"]
    assert listed["eagle"]["tree"] == "chain-4"

    for options, said in (
        (("--method", "eagle", "--tree", "eagle-25"), "chain"),
        (("--method", "eagle", "--verify", "block"), "--verify token"),
        (("--method", "jacobi-coupled"), "--method ar"),
        (("--method", "eagle", "--accept", "cool", "--delta", 1.5), "--accept exact"),
        (("--method", "lantern++"), "no codebook"),
        (("--temperature", 0), "temperature 0"),
        (("--top-k", 5), "top-k 5"),
        (("--top-p", 0.9), "top-p 0.9"),
    ):
        outcome = run("generate", *draw, *options)
        assert outcome.code == 2 and outcome.err.count("\n") == 1, (options, outcome.err)
        assert said in outcome.err, (options, outcome.err)


def test_a_model_with_a_diffusion_head_from_photos_to_a_comparison(run, photos: Path) -> None:
    base = ("--data", "photos", "--model", "mine")
    shape = ("--dim", 32, "--layers", 1, "--heads", 2, "--hidden", 48)
    head = ("--head", "diffusion", "--denoising-steps", 3, "--denoiser-width", 16, "--denoiser-blocks", 1)
    assert run("train", "tokenizer", *base, "--kind", "kl", "--size", 32, "--channels", 4, *SMALL).code == 0
    for wrong, said in (
        (("--head", "diffusion", "--components", 3), "--components 3 is of --head mixture"),
        (("--head", "mixture", "--denoising-steps", 3), "--denoising-steps 3 is of --head diffusion"),
        (("--denoiser-width", 16), "--denoiser-width 16 is of --head diffusion"),
        (("--head", "diffusion", "--denoising-steps", 0), "denoising steps 0"),
        (
            ("--head", "diffusion", "--weights-of", "nature-128"),
            "--dim 384 --layers 14 --heads 6 --hidden 1024",
        ),
    ):
        outcome = run("train", "target", *base, *shape, *SMALL, *wrong)
        assert outcome.code == 2 and said in outcome.err, outcome.err
    for part in (("target", *base, *shape, *head), ("drafter", *base)):
        done = run("train", *part, *SMALL)
        assert done.code == 0, done.err
    draw = ("a red tulip", "--model", "mine")
    for options in ((), ("--accept", "cspd")):
        compared = run("compare", *draw, "--runs", 1, "--cfg", 2, "--method", "eagle", *options, "--json")
        assert compared.code == 0, compared.err
        eagle = json.loads(compared.out)["methods"][-1]
        assert (eagle["method"], eagle["settings"]["tree"], eagle["codes"]) == ("eagle", "chain-4", 16)
    listed = json.loads(run("models", "--model", "mine", "--json").out)["methods"]
    assert [row["name"] for row in listed if row["fits"]] == ["ar", "eagle"]
    for options, said in (
        (("--method", "eagle", "--tree", "eagle-25"), "chain"),
        (("--method", "eagle", "--accept", "cool", "--delta", 1.5), "--accept exact or cspd"),
        (("--temperature", 0), "temperature 0"),
    ):
        outcome = run("generate", *draw, *options)
        assert outcome.code == 2 and said in outcome.err, (options, outcome.err)
    codes = run("generate", "a red tulip", "--model", "nature-128", "--method", "eagle", "--accept", "cspd")
    assert codes.code == 2 and "the rule cspd is for latents" in codes.err
