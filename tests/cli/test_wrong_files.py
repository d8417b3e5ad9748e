"""Published files that are not what they should be: one line on stderr, status 2, and no picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import checkpoints as llamagen
from helpers.families import write_chameleon, write_eagle
from helpers.models import change
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def anole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Anole."""
    folder = tmp_path_factory.mktemp("published") / "anole"
    write_chameleon(folder)
    return folder


def test_a_spoiled_checkpoint_is_refused(run, anole: Path) -> None:
    path, draw = anole / "model.safetensors", ("generate", "a photo", "--model", anole, "--method", "ar")
    whole = path.read_bytes()
    tensors = load_file(path) | {"model.vqmodel.quantize.embedding.weight": torch.ones(128, 4)}
    save_file(tensors, path, metadata={"format": "pt"})
    run(*draw).refused("has 64 codes", "has 128")
    path.write_bytes(whole[: len(whole) // 2])
    run(*draw).refused("model.safetensors", "truncated")
    path.write_bytes(whole)


def test_a_drafter_of_another_width_is_refused(run, anole: Path, tmp_path: Path) -> None:
    write_eagle(tmp_path / "wide", 64)
    llamagen.write_drafter(tmp_path / "published")
    for name in ("wide", "published"):  # ours, and one that EAGLE's code wrote
        outcome = run("generate", "a photo", "--model", anole, "--drafter", tmp_path / name)
        outcome.refused(str(tmp_path / name), "64 wide", "the target 32")


TARGET, VQ, DRAFTER, DEFAULTS = (
    *(f"{part}/config.json" for part in ("target", "tokenizer", "drafter")),
    "defaults.json",
)


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        (TARGET, {"heads": 0}, "heads 0 cannot be used: it should be greater than or equal to 1"),
        (TARGET, {"layers": 100_000}, "layers 100000 cannot be used: it should be less than or equal to 512"),
        (TARGET, {"dim": 65536, "layers": 512, "hidden": 262144}, "does not fit WordsTarget"),
        (TARGET, {"heads": 3}, "no network has the sizes of its config.json"),
        (TARGET, {"kind": "gpt2"}, "'gpt2'"),
        (VQ, {"channels": [50, 50]}, "no network has the sizes of its config.json"),
        (VQ, {"channels": [8192, 8192], "codes": 1 << 20}, "does not fit VQ"),
        (VQ, {"kind": ["vq"]}, "kind ['vq'] cannot be used: it should be 'vq' or 'kl'"),
        (DRAFTER, {"heads": 4}, "does not fit EagleDrafter"),
        (DEFAULTS, {"cfg": "high"}, "cfg 'high' is no number"),
        (DEFAULTS, {"neighbours": -1}, "the model's defaults: neighbours -1 is out of range"),
        (DEFAULTS, {"methods": {"eagle": {"neighbours": 1 << 30}}}, "methods.eagle.neighbours 1073741824 is"),
        (DEFAULTS, {"methods": []}, "methods [] cannot be used: it should be an object"),
        (DEFAULTS, {"methods": {"eagle": {"tree": [[0]]}}}, "methods.eagle.tree [[0]] is no text"),
    ],
)
def test_a_spoiled_config_of_ours_is_refused(file: str, fields: dict, said: str, run, broken: Path) -> None:
    change(broken / file, **fields)
    run("generate", "a red tulip", "--model", broken, "--method", "eagle").refused(said)


def not_a_number(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.index_fill(0, torch.tensor(3), float("nan"))


@pytest.mark.parametrize(
    ("part", "name", "spoil", "said"),
    [
        ("target", "decoder.norm.weight", not_a_number, "holds NaN or infinity"),
        ("tokenizer", "decoder.0.weight", torch.Tensor.long, "holds int64 where weights are expected"),
    ],
)
def test_spoiled_weights_of_ours_are_refused(
    part: str, name: str, spoil: Callable[[torch.Tensor], torch.Tensor], said: str, run, broken: Path
) -> None:
    path = broken / part / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: spoil(tensors[name])}, path)
    run("generate", "a red tulip", "--model", broken, "--method", "eagle").refused(f"{name} {said}")


def test_names_and_tree_files_that_cannot_be_read_are_one_line(run, model: Path, tmp_path: Path) -> None:
    draw, tree = ("generate", "a red tulip", "--model"), tmp_path / "tree.json"
    run(*draw, "x" * 5000).refused("File name too long")
    cases = {b"\xff": "no text in UTF-8", b"[" * 9999: "deep", b'{"a": 1}': "list of paths"}
    for content, said in cases.items():
        tree.write_bytes(content)
        run(*draw, model, "--tree", tree).refused(str(tree), said)
