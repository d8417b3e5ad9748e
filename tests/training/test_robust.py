"""Trainings by several processes, full disks, and what is rejected before work is lost."""

import errno
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.killed import exit_status, run_command, start, team_environments
from helpers.models import update_json, write_model
from helpers.refusals import rejects
from helpers.stages import log, weights
from safetensors import SafetensorError

from lanternpp.api.model import Model, read_target
from lanternpp.drafters.base import DrafterWarning, mark
from lanternpp.nn import checkpoints
from lanternpp.training import codes
from lanternpp.training.team import Team, keep_freed_memory

CPU = torch.device("cpu")


def test_two_processes_train_the_same_weights_as_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    shutil.rmtree(write_model(tmp_path / "one" / "tiny") / "drafter")
    (tmp_path / "one" / "mine").write_text("red tulip\na tulip\n")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    processes = [start(run_command, "together", str(tmp_path / "one"))]
    processes += [
        start(run_command, "together", str(tmp_path / "two"), None, env) for env in team_environments()
    ]
    assert [exit_status(process) for process in processes] == [0, 0, 0]
    models = tmp_path / "one" / "tiny", tmp_path / "two" / "tiny"
    alone, together = (weights(model, "drafter") for model in models)
    gaps = torch.cat([(tensor - together[name]).abs().flatten() for name, tensor in alone.items()])
    assert gaps.max() < 2e-3  # where a gradient is next to nothing, Adam's step has the sign of its rounding
    assert (gaps > 1e-4).double().mean() < 1e-3
    assert len(log(models[0], "drafter")) == len(log(models[1], "drafter")), "one process alone writes"
    losses = [[row["loss"] for row in log(model, "drafter") if "loss" in row] for model in models]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("alone", [False, True])
def test_processes_without_a_team_do_not_train(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setenv("WORLD_SIZE", "2")
    if alone:
        monkeypatch.setattr("accelerate.Accelerator", lambda **_: SimpleNamespace(num_processes=1))
    rejects("WORLD_SIZE is 2, but no such team of processes was started .*: use accelerate launch", Team)


WRITERS: dict[str, Callable[[Path], None]] = {
    "state": lambda path: checkpoints.write_pt(path, {"x": torch.zeros(1 << 18)}),
    "weights": lambda path: checkpoints.save(path.parent, {}, {"x": torch.zeros(1 << 18)}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_one_sentence_and_keeps_the_old_file(name: str, tmp_path: Path, monkeypatch) -> None:
    write = WRITERS[name]
    write(tmp_path / "state.pt")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def no_room(tensors: object, path: Path, metadata: object = None) -> None:
        Path(path).write_bytes(b"a piece")  # safetensors replaces the link by its file
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    def no_end(content: object, file: object) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1152 vs 1046")  # noqa: B904

    monkeypatch.setattr(checkpoints, "save_file", no_room)
    monkeypatch.setattr(torch, "save", no_end)
    rejects("could not be written, the disk is full: free some room", write, tmp_path / "state.pt")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_cache_that_would_not_fit_is_rejected_after_its_first_file(tmp_path: Path, monkeypatch) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=codes.SPARE_BYTES + (1 << 21))
    monkeypatch.setattr(codes.shutil, "disk_usage", lambda path: free)

    def compute(parts: Sequence[range], done: Callable[[float], None]) -> Iterator[codes.Shard]:
        for part in parts:
            done(part.stop)
            yield {"features": torch.zeros(len(part), 1 << 17)}, {}

    assert len(codes.build_shards(tmp_path / "small", 4, 2, compute, "the features")) == 2
    said = r"the features takes another 3.1 MB in .*large and the disk has 270.5 MB free, of which 268.4 MB stay free"
    rejects(said, codes.build_shards, tmp_path / "large", 8, 2, compute, "the features")
    assert [path.name for path in (tmp_path / "large").iterdir()] == ["00000.safetensors"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other limits")
def test_the_memory_of_a_large_tensor_is_used_again() -> None:
    import resource  # not on Windows

    keep_freed_memory()
    size = 1 << 26  # bytes, 16,384 pages
    torch.ones(size, dtype=torch.uint8)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(size, dtype=torch.uint8)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 2 * 16_384


def test_a_batch_that_processes_cannot_share_is_rejected() -> None:
    team = Team()
    team.size = 2
    said = "a batch of 9 pictures, which is --batch-size or all that .*, cannot be shared by 2 processes"
    rejects(said, team.share, torch.zeros(9))


def test_gradients_of_any_layout_are_averaged() -> None:
    team, layer = Team(), torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    team.accelerator = SimpleNamespace(reduce=lambda x, how: 2 * x)
    layer(torch.randn(1, 3, 8, 8).to(memory_format=torch.channels_last)).square().sum().backward()
    before = layer.weight.grad.clone()
    team.average_gradients([torch.optim.SGD(layer.parameters())])
    assert torch.equal(layer.weight.grad, 2 * before)


def read(model: Path, dtype: torch.dtype = torch.float32) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DrafterWarning)
        assert Model(model, None, CPU, dtype).network("drafter")


def test_a_drafter_of_another_target_is_rejected_or_warned_of(tmp_path: Path) -> None:
    config = write_model(tmp_path) / "drafter" / "config.json"
    known = mark(read_target(tmp_path, torch.float32))
    update_json(config, target=known)
    for dtype in (torch.float32, torch.bfloat16):
        read(tmp_path, dtype)
    update_json(config, target=known | {"vocab": 99})
    rejects(r"for a target of 99 codes and this one has 32", read, tmp_path)
    update_json(config, target=known)
    shape, tensors = checkpoints.load(tmp_path / "target")
    checkpoints.save(tmp_path / "target", shape, {k: v.flip(0) for k, v in tensors.items()})
    with pytest.raises(DrafterWarning, match="trained for another target than this one"):
        read(tmp_path)
