"""The command line on tiny LlamaGen checkpoints in their published layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import checkpoints

from lanternpp.api.options import METHODS

PROMPTS = {"t2i": ("a red tulip", 7.5), "c2i": ("7", 4.0)}  # and guidance


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """c2i and t2i, and drafters."""
    folder = tmp_path_factory.mktemp("published")
    checkpoints.write_llamagen(folder / "c2i")
    checkpoints.write_llamagen(folder / "t2i", text=True)
    checkpoints.write_drafter(folder / "c2i-drafter")
    checkpoints.write_drafter(folder / "t2i-drafter", text=True)
    return folder


# A target of classes differs in its prompt. More neighbours than these would exceed the tiny codebooks.
@pytest.mark.parametrize(
    ("method", "kind", "more"),
    [
        ("lantern++", "t2i", ("--neighbours", 8)),
        ("independent", "t2i", ()),
        ("jacobi-coupled", "t2i", ()),
        ("ar", "c2i", ()),
        ("eagle", "c2i", ()),
        ("parallel", "c2i", ()),
        ("lantern-jacobi", "c2i", ("--neighbours", 8)),
    ],
)
def test_methods_of_every_proposer_draw(method: str, kind: str, more, run, models: Path) -> None:
    """The target is named by its file."""
    proposer, prompt, cfg = METHODS[method].dials["proposer"], *PROMPTS[kind]
    drafters = dict.fromkeys(("tree", "parallel"), f"{kind}-drafter") | {"independent": kind}
    drafter = ("--drafter", models / drafters[proposer]) if proposer in drafters else ()
    draw = ("generate", prompt, "--model", models / kind / "t2i_XL_tiny.pt", "--method", method, *drafter)
    figures = run(*draw, *more, "-n", 3, "--json").json
    assert (figures["images"], figures["codes"], figures["model"]) == (3, 3 * 16, "t2i_XL_tiny")
    assert figures["settings"]["cfg"] == cfg and figures["settings"]["batch_size"] == 3
    assert Path(figures["file"]).is_file()


def test_wrong_checkpoints_are_rejected(run, tmp_path: Path) -> None:
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
