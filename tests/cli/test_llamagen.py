"""The command line on tiny LlamaGen checkpoints in their published layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import checkpoints
from PIL import Image

from lanternpp.api.options import METHODS


def options(method: str, model: Path, drafter: Path) -> list[object]:
    """A method, as many neighbours as the tiny codebooks have, and something to draft with."""
    few = ["--neighbours", 8] if METHODS[method].dials.get("neighbours") else []
    none: list[object] = []
    own = {
        "none": none,
        "tree": ["--drafter", drafter],
        "parallel": ["--drafter", drafter],
        "independent": ["--drafter", model],
        "jacobi": none,
    }
    return ["--method", method, "--json", *few, *own[METHODS[method].dials["proposer"]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """c2i and t2i, a copy under Llama names, and drafters."""
    folder = tmp_path_factory.mktemp("published")
    checkpoints.write_llamagen(folder / "c2i")
    checkpoints.write_llamagen(folder / "t2i", text=True)
    checkpoints.write_llamagen(folder / "copy", text=True, layout="llama")
    checkpoints.write_drafter(folder / "c2i-drafter")
    checkpoints.write_drafter(folder / "t2i-drafter", text=True)
    return folder


def drawn(outcome: object, n: int) -> dict[str, object]:
    """The figures of a run that drew n pictures of 16 codes, 64 px."""
    assert (outcome.code, outcome.err) == (0, "")
    figures = json.loads(outcome.out)
    assert (figures["images"], figures["codes"]) == (n, 16 * n)
    assert Path(figures["file"]).is_file()
    return figures


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_drawn_by_every_method(method: str, run, models: Path) -> None:
    args = ["--model", models / "t2i", *options(method, models / "t2i", models / "t2i-drafter")]
    three = drawn(run("generate", "a red tulip", *args, "-n", 3), 3)
    assert three["settings"]["cfg"] == 7.5 and three["settings"]["batch_size"] == 3
    if method in ("lantern++", "jacobi-coupled"):
        sides = drawn(run("compare", "a red tulip", *args, "--cfg", 1, "--runs", 1), 1)
        assert [side["method"] for side in sides["methods"]] == ["ar", method]


@pytest.mark.parametrize("method", METHODS)
def test_classes_are_drawn_by_every_method(method: str, run, models: Path) -> None:
    file = models / "c2i" / "t2i_XL_tiny.pt"
    args = options(method, models / "c2i", models / "c2i-drafter")
    one = drawn(run("generate", "7", "--model", file, *args), 1)
    assert one["model"] == "t2i_XL_tiny" and one["settings"]["cfg"] == 4.0
    if method in ("lantern++", "jacobi-coupled"):
        drawn(run("generate", "7", "--model", models / "c2i", *args, "-n", 3, "--cfg", 1), 3)


def test_a_copy_under_llama_names_draws_the_same_picture(run, models: Path, elsewhere: Path) -> None:
    for name in ("t2i", "copy"):
        drawn(
            run(
                "generate",
                "a red tulip",
                "--model",
                models / name,
                "--method",
                "ar",
                "-o",
                f"{name}.png",
                "--json",
            ),
            1,
        )
    pictures = [Image.open(elsewhere / f"{name}.png").convert("RGB") for name in ("t2i", "copy")]
    assert pictures[0].size == (64, 64) and pictures[0].tobytes() == pictures[1].tobytes()


def refused(outcome: object, *says: str) -> None:
    """One line, status 2."""
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    for said in says:
        assert said in outcome.err


def test_what_cannot_be_drawn_is_refused_in_one_line(run, models: Path, tmp_path: Path) -> None:
    refused(run("generate", "10", "--model", models / "c2i", "--method", "ar"), "class 10", "0 to 9")
    refused(run("generate", "a cat", "--model", models / "c2i", "--method", "ar"), "'a cat'", "0 to 9")
    drafted = ("--model", models / "c2i", "--method", "lantern++")
    refused(run("generate", "7", *drafted), "comes without a drafter", "--drafter")
    refused(
        run("generate", "7", *drafted, "--drafter", models / "t2i" / "t2i_XL_tiny.pt"),
        "no drafter known here",
    )


def test_checkpoints_that_cannot_be_used_are_refused_in_one_line(run, tmp_path: Path) -> None:
    folder = checkpoints.write_llamagen(tmp_path / "m")
    draw = ("generate", "7", "--model", folder, "--method", "ar")
    (folder / "config.json").unlink()
    refused(run(*draw), "t2i_XL_tiny.pt", "256, 384 or 512")
    (folder / "config.json").write_text('{"block_size": 16}')
    torch.save({"model": checkpoints.vq16(codes=20)}, folder / "vq_ds16.pt")
    refused(run(*draw), "48 codes", "has 20")
    (folder / "vq_ds16.pt").unlink()
    refused(run(*draw), "no image tokenizer", "vq_ds16_c2i.pt")
    whole = (folder / "t2i_XL_tiny.pt").read_bytes()
    (folder / "t2i_XL_tiny.pt").write_bytes(whole[: len(whole) // 2])
    refused(run(*draw), "t2i_XL_tiny.pt is truncated")
    torch.save({"model.embed_tokens.weight": torch.ones(4, 4)}, folder / "t2i_XL_tiny.pt")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    refused(run(*draw), "no model family known here", "'llama'", "LlamaGen's .pt files")


def test_without_its_encoder_a_text_is_refused_unless_its_features_are_stored(run, tmp_path: Path) -> None:
    folder = checkpoints.write_llamagen(tmp_path / "m", text=True)
    (folder / "flan-t5-xl" / "model.safetensors").unlink()
    draw = ("--model", folder, "--method", "ar", "--json")
    refused(run("generate", "a red tulip", *draw), "text encoder", "text/", "embeddings.safetensors")
    features = {"a red tulip": checkpoints.numbers("x", (4, 24)), "long": checkpoints.numbers("y", (4, 7))}
    checkpoints.save_file(features, folder / "embeddings.safetensors")
    drawn(run("generate", "a red tulip", *draw), 1)
    refused(run("generate", "long", *draw), "(4, 7)", "google/flan-t5-xl")
