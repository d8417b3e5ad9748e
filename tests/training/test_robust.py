"""What a training survives: kills at any moment, a full disk; and what it refuses before work is lost."""

import json
import shutil
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.killed import start
from helpers.models import write_model
from helpers.shared import learn as learn_together
from safetensors import SafetensorError

from lanternpp.api.model import Model, read_target
from lanternpp.drafters.base import DrafterWarning, mark
from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.errors import InputError
from lanternpp.nn import checkpoints
from lanternpp.training import material
from lanternpp.training.state import rewind
from lanternpp.util import files

CPU = torch.device("cpu")


def result(model: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    rows = [json.loads(line) for line in (model / "drafter" / "log.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("seconds", None)
    return checkpoints.load(model / "drafter")[1], rows


def test_two_processes_learn_what_one_does_from_the_same_batches(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    write_model(tmp_path / "one")
    shutil.rmtree(tmp_path / "one" / "drafter")
    (tmp_path / "one" / "mine").write_text("red tulip\na tulip\n")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lives = [start(learn_together, str(tmp_path / "one"), 0, 1, port)]
    lives += [start(learn_together, str(tmp_path / "two"), rank, 2, port) for rank in range(2)]
    for life in lives:
        life.join()
    assert [life.exitcode for life in lives] == [0, 0, 0]
    (alone, log), (together, again) = result(tmp_path / "one"), result(tmp_path / "two")
    apart = torch.cat([(tensor - together[name]).abs().flatten() for name, tensor in alone.items()])
    assert apart.max() < 2e-3  # where a gradient is next to nothing, Adam's step has the sign of its rounding
    assert (apart > 1e-4).double().mean() < 1e-3
    assert [row["loss"] for row in log if "loss" in row] == pytest.approx(
        [row["loss"] for row in again if "loss" in row], rel=1e-3
    )


def test_a_log_is_rewound_to_the_saved_step(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 5, "loss": 1}\n{"step": 5, "validation": {}}\n{"step": 10, "loss": 2}\n{"ste')
    rewind(log, 5)
    assert log.read_text() == '{"step": 5, "loss": 1}\n{"step": 5, "validation": {}}\n'
    rewind(tmp_path / "none", 5)


WRITERS: dict[str, Callable[[Path], None]] = {
    "state": lambda path: checkpoints.write_pt(path, {"x": torch.zeros(1 << 18)}),
    "weights": lambda path: checkpoints.save(path.parent, {}, {"x": torch.zeros(1 << 18)}),
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_one_sentence_and_the_old_file_stays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = WRITERS[name]
    write(tmp_path / "state.pt")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(self: files.replacing) -> Path:
        self.temporary.symlink_to("/dev/full")
        return self.temporary

    def no_room(tensors: object, path: Path, metadata: object = None) -> None:
        Path(path).write_bytes(b"a piece")  # safetensors puts its file in the place of the link
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(files.replacing, "__enter__", full)
    if name == "weights":
        monkeypatch.undo()
        monkeypatch.setattr(checkpoints, "save_file", no_room)
    with pytest.raises(
        InputError, match=r"could not be written, the disk is full: free some room"
    ) as refusal:
        write(tmp_path / "state.pt")
    assert "\n" not in str(refusal.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_disk_leaves_no_piece_of_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(material, "save_file", full)
    with pytest.raises(InputError, match=r"00000\.safetensors could not be written, the disk is full"):
        material.write_file(tmp_path / "00000.safetensors", {"x": torch.zeros(4)}, {})
    assert not list(tmp_path.iterdir())


def test_a_cache_that_would_not_fit_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=1 << 29)
    monkeypatch.setattr(material.shutil, "disk_usage", lambda path: free)
    material.check_disk_space(tmp_path / "new" / "cache", 1 << 20, "the features")
    with pytest.raises(
        InputError, match=r"the features takes? 1\.0 GiB in .*cache and the disk has 512\.0 MiB"
    ):
        material.check_disk_space(tmp_path / "new" / "cache", 1 << 30, "the features")
    assert not (tmp_path / "new").exists()


def drafter_of(model: Path, **known: Any) -> None:
    target = read_target(model, torch.float32)
    config = EagleConfig.like(target.decoder.config)
    torch.manual_seed(0)
    weights = EagleDrafter(config, target.decoder.rotary_table).state_dict()
    about = {"kind": "eagle", **config.flat(), "target": {**mark(target), **known}}
    checkpoints.save(model / "drafter", about, weights)


def read(model: Path, dtype: torch.dtype = torch.float32) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DrafterWarning)
        assert Model(model, None, CPU, dtype).network("drafter")


def test_a_drafter_knows_its_target(tmp_path: Path) -> None:
    write_model(tmp_path)
    drafter_of(tmp_path)
    read(tmp_path)
    read(tmp_path, torch.bfloat16)
    drafter_of(tmp_path, vocab=99)
    with pytest.raises(InputError, match=r"for a target of 99 codes and this one has 32"):
        read(tmp_path)
    drafter_of(tmp_path)
    config, tensors = checkpoints.load(tmp_path / "target")
    checkpoints.save(tmp_path / "target", config, {k: v.flip(0) for k, v in tensors.items()})
    with pytest.raises(DrafterWarning, match="trained for another target than this one"):
        read(tmp_path)
