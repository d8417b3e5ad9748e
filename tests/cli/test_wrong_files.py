"""Published files that are not what they should be: one line on stderr, status 2, and no picture."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import checkpoints as llamagen
from helpers.families import write_chameleon, write_tokenizer
from safetensors.torch import load_file, save_file

from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.nn import checkpoints
from lanternpp.nn.decoder import DecoderConfig
from lanternpp.nn.rope import line_table

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class Bomb:
    """Pickled, it is a call of print."""

    def __reduce__(self) -> tuple[object, ...]:
        return print, ("boom",)


@pytest.fixture(scope="module")
def anole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Anole in two shards."""
    folder = tmp_path_factory.mktemp("published") / "anole"
    write_chameleon(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: SHARDS[i % 2] for i, name in enumerate(tensors)}
    for shard in SHARDS:
        part = {name: tensor for name, tensor in tensors.items() if where[name] == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def only_text(folder: Path) -> None:
    """As Meta published it: no names for the image's codes, and no VQ decoder."""
    write_tokenizer(folder, ["<s>", "</s>", "<unk>"])


def other_codebook(folder: Path) -> None:
    path = next(
        folder / s for s in SHARDS if "model.vqmodel.quantize.embedding.weight" in load_file(folder / s)
    )
    tensors = load_file(path)
    tensors["model.vqmodel.quantize.embedding.weight"] = torch.ones(128, 4)
    save_file(tensors, path, metadata={"format": "pt"})


def truncated_shard(folder: Path) -> None:
    whole = (folder / SHARDS[1]).read_bytes()
    (folder / SHARDS[1]).write_bytes(whole[: len(whole) // 2])


def missing_shard(folder: Path) -> None:
    (folder / SHARDS[0]).unlink()


def pickle_with_code(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    torch.save({"model.norm.weight": torch.ones(4), "x": Bomb()}, folder / "pytorch_model.bin")


def missing_field(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))


def no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (only_text, ["only writes text", "Anole-7B"]),
        (other_codebook, ["(128, 4)", "(64, 4)"]),
        (truncated_shard, [SHARDS[1], "truncated"]),
        (missing_shard, [SHARDS[0], "missing"]),
        (pickle_with_code, ["pytorch_model.bin", "could run code", "convert it to safetensors"]),
        (missing_field, ["missing model.layers.10."]),
        (no_json, ["config.json", "not valid JSON"]),
    ],
)
def test_a_spoiled_checkpoint_is_refused_in_one_line(
    spoil: Callable[[Path], None], said: list[str], run, anole: Path, tmp_path: Path, elsewhere: Path
) -> None:
    folder = Path(shutil.copytree(anole, tmp_path / "anole"))
    draw = ("generate", "a photo", "--model", folder, "--method", "ar")
    spoil(folder)
    refused(run(*draw), said, elsewhere)


def refused(outcome: object, said: list[str], folder: Path) -> None:
    """One line, status 2, nothing run and nothing written."""
    assert outcome.code == 2 and outcome.out == ""
    assert outcome.err.startswith("lanternpp: error: ") and outcome.err.count("\n") == 1, outcome.err
    for words in said:
        assert words in outcome.err
    assert not list(folder.iterdir())


def test_a_drafter_of_another_width_is_refused_in_one_line(
    run, anole: Path, tmp_path: Path, elsewhere: Path
) -> None:
    shape = EagleConfig.like(DecoderConfig(64, 1, 4, 48))
    drafter = EagleDrafter(shape, line_table(8, 16))
    checkpoints.save(tmp_path / "wide", {"kind": "eagle", **shape.flat()}, drafter.state_dict())
    llamagen.write_drafter(tmp_path / "published")
    for name in ("wide", "published"):  # ours, and one that EAGLE's code wrote
        outcome = run("generate", "a photo", "--model", anole, "--drafter", tmp_path / name)
        refused(outcome, [str(tmp_path / name), "64 wide", "the target 32"], elsewhere)


def change(path: Path, **fields: object) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def not_a_number(folder: Path) -> None:
    path = folder / "target" / "model.safetensors"
    tensors = load_file(path)
    tensors["decoder.norm.weight"][3] = float("nan")
    save_file(tensors, path)


def of_int64(folder: Path) -> None:
    path = folder / "tokenizer" / "model.safetensors"
    tensors = load_file(path)
    tensors["decoder.0.weight"] = tensors["decoder.0.weight"].long()
    save_file(tensors, path)


TARGET, VQ = "target/config.json", "tokenizer/config.json"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: change(f / TARGET, heads=0), ["heads 0 cannot be used; use 1 to 1,024"]),
        (lambda f: change(f / TARGET, dim="32"), ["dim '32' cannot be used; use a whole number"]),
        (lambda f: change(f / TARGET, layers=100_000), ["layers 100000 cannot be used; use 1 to 512"]),
        (lambda f: change(f / TARGET, dim=65536, layers=512, hidden=262144), ["does not fit WordsTarget"]),
        (lambda f: change(f / TARGET, heads=3), ["no network has the sizes of its config.json"]),
        (lambda f: change(f / VQ, channels=[50, 50]), ["no network has the sizes of its config.json"]),
        (lambda f: change(f / VQ, channels=[8192, 8192], codes=1 << 20), ["does not fit VQ"]),
        (lambda f: change(f / "drafter/config.json", heads=4), ["drafter", "does not fit EagleDrafter"]),
        (
            lambda f: change(f / "defaults.json", cfg="high"),
            ["cfg 'high' cannot be used; use a finite number"],
        ),
        (
            lambda f: change(f / "defaults.json", neighbours=-1),
            ["the model's defaults: neighbours -1 is out of range"],
        ),
        (
            lambda f: change(f / "defaults.json", methods={"eagle": {"neighbours": 1 << 30}}),
            ["methods.eagle.neighbours 1073741824 is out of range"],
        ),
        (lambda f: change(f / VQ, kind="vqgan"), ["kind 'vqgan' cannot be used; use one of vq, kl"]),
        (lambda f: change(f / VQ, kind=["vq"]), ["kind ['vq'] cannot be used; use one of vq, kl"]),
        (lambda f: change(f / "defaults.json", methods=[]), ["methods [] cannot be used; use an object"]),
        (
            lambda f: change(f / "defaults.json", methods={"eagle": {"tree": [[0]]}}),
            ["methods.eagle.tree [[0]]", "use text"],
        ),
        (not_a_number, ["decoder.norm.weight holds NaN or infinity"]),
        (of_int64, ["decoder.0.weight holds int64 where weights are expected"]),
    ],
)
def test_a_spoiled_folder_of_ours_is_refused_in_one_line(
    spoil: Callable[[Path], None], said: list[str], run, broken: Path, elsewhere: Path
) -> None:
    spoil(broken)
    refused(run("generate", "a red tulip", "--model", broken, "--method", "eagle"), said, elsewhere)


def test_names_and_tree_files_that_cannot_be_read_are_one_line(
    run, model: Path, tmp_path: Path, elsewhere: Path
) -> None:
    refused(run("generate", "a red tulip", "--model", "x" * 5000), ["File name too long"], elsewhere)
    tree = tmp_path / "tree.json"
    for content, said in (
        (b"\xff", "no text in UTF-8"),
        (b"[" * 9999, "deep"),
        (b'{"a": 1}', "list of paths"),
    ):
        tree.write_bytes(content)
        refused(
            run("generate", "a red tulip", "--model", model, "--tree", tree), [str(tree), said], elsewhere
        )
