"""Published files that are not what they should be: one line on stderr, status 2, and no picture."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import checkpoints as llamagen
import pytest
import torch
from families import write_chameleon, write_tokenizer
from safetensors.torch import load_file, save_file

from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.nn import checkpoints
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
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
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
    save_file(tensors, path)


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
        (missing_field, ["config.json", "num_hidden_layers"]),
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
    shape = EagleConfig(64, 4, 48)
    drafter = EagleDrafter(shape, line_table(8, 16))
    checkpoints.save(tmp_path / "wide", {"kind": "eagle", **asdict(shape)}, drafter.state_dict())
    llamagen.write_drafter(tmp_path / "published")
    for name in ("wide", "published"):  # ours, and one that EAGLE's code wrote
        outcome = run("generate", "a photo", "--model", anole, "--drafter", tmp_path / name)
        refused(outcome, [str(tmp_path / name), "64 wide", "the target 32"], elsewhere)
