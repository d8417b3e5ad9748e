"""Model folders are read as they were written, and files are not trusted."""

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.refusals import rejects
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from lanternpp.errors import InputError
from lanternpp.nn import checkpoints
from lanternpp.nn.files import read_pt
from lanternpp.nn.sources import SAME, Source
from lanternpp.util import files


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.Linear(4, 6), nn.BatchNorm1d(6))


def test_float32_round_trip_is_exact_with_its_config(tmp_path: Path) -> None:
    one, two = net(), net()
    with torch.no_grad():
        two[0].weight.zero_()
    checkpoints.save(tmp_path, {"kind": "toy", "sizes": [1, 2]}, one.state_dict())
    Source.open(tmp_path).fill(two, [SAME], torch.float32)
    assert checkpoints.load_config(tmp_path) == {"kind": "toy", "sizes": [1, 2]}
    assert all(torch.equal(tensor, two.state_dict()[name]) for name, tensor in one.state_dict().items())


def test_the_same_weights_are_the_same_bytes(tmp_path: Path) -> None:
    found = set()
    for _ in range(3):
        checkpoints.save(tmp_path, {}, net().state_dict())
        found.add((tmp_path / checkpoints.WEIGHTS).read_bytes())
    assert len(found) == 1


def test_six_bits_take_three_quarters_of_eight_with_a_smaller_error_than_plain_rounding(
    tmp_path: Path,
) -> None:
    tensors = {
        "conv": torch.randn(8, 512, 3, 3) * torch.logspace(-3, 2, 8)[:, None, None, None],
        "odd": torch.randn(6, 50),  # rows that do not come in fours: 8 bits
        "bias": torch.randn(7),
        "codebook": torch.randn(8, 4),
        "zero": torch.zeros(4, 3),
    }
    checkpoints.save(tmp_path, {}, tensors, "int6", keep=["codebook"])
    read = checkpoints.load(tmp_path)[1]
    assert all(torch.equal(read[name], tensors[name]) for name in ("bias", "zero", "codebook"))
    rows = tensors["conv"].flatten(1)
    step = rows.abs().amax(1, keepdim=True) / 31
    plain = ((rows / step).round() * step - rows).square().sum(1)
    error = (read["conv"].flatten(1) - rows).square().sum(1)
    assert (error <= plain * 1.0001).all() and (error / plain).mean() < 0.9
    assert all(len(row.unique()) <= 63 for row in read["conv"])
    bound = tensors["odd"].abs().amax(1, keepdim=True) / 127 / 2
    assert ((read["odd"] - tensors["odd"]).abs() <= bound * 1.001).all()
    with safe_open(tmp_path / checkpoints.WEIGHTS, "pt") as file:
        assert file.get_tensor("conv").nbytes == 8 * 512 * 9 * 6 // 8
    checkpoints.save(tmp_path / "again", {}, read, "int6")
    again = checkpoints.load(tmp_path / "again")[1]["conv"]
    assert torch.allclose(again, read["conv"], rtol=1e-5)  # nothing more is lost


def test_truncated_foreign_and_missing_files_are_rejected(tmp_path: Path, monkeypatch) -> None:
    checkpoints.save(tmp_path, {"kind": "toy"}, net().state_dict())
    # Torch reports an interrupt as this error.
    with monkeypatch.context() as torchs, pytest.raises(KeyboardInterrupt):
        torchs.setattr(torch, "asarray", lambda *_, **__: int("could not determine the shape of object type"))
        checkpoints.load(tmp_path)
    path = tmp_path / checkpoints.WEIGHTS
    path.write_bytes(path.read_bytes()[:500])
    rejects(f"{path} is truncated", checkpoints.load, tmp_path)
    path.unlink()
    rejects("missing", checkpoints.load, tmp_path)
    (tmp_path / checkpoints.CONFIG).write_text("{oops")
    rejects("valid JSON", checkpoints.load, tmp_path)
    (tmp_path / checkpoints.CONFIG).unlink()
    rejects("no model folder", checkpoints.load, tmp_path)


@pytest.mark.parametrize("scale", [torch.ones(3), torch.ones(4, 1), torch.ones(4, dtype=torch.int8)])
def test_a_scale_that_does_not_fit_its_tensor_is_rejected(scale: torch.Tensor, tmp_path: Path) -> None:
    save_file({"x": torch.ones(4, 2, dtype=torch.int8), "x.scale": scale}, tmp_path / checkpoints.WEIGHTS)
    rejects("x is .* and its scale .* which do not go together", lambda: Source.open(tmp_path).metas)


def test_an_interrupted_save_leaves_no_new_weights_with_an_old_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(tmp_path, {"width": 1}, {"x": torch.zeros(1)})

    def interrupt(*_: object, **__: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "write_text", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(tmp_path, {"width": 2}, {"x": torch.zeros(2)})
    rejects("no model folder", checkpoints.load, tmp_path)


class RunsCode:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("boom",)


def deflated(path: Path) -> None:
    """A checkpoint whose pickle is small on disk and unpacks to hundreds of megabytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + b"N0" * (1 << 24) + b"}.")
        archive.writestr("x/version", b"3\n")


def nested(path: Path) -> None:
    """Dicts in each other, deeper than Python recurses; the usual name of weights all the way down."""
    pickled = b"\x80\x02" + b"}X\x05\x00\x00\x00model" * 5000 + b"}" + b"s" * 5000 + b"."
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (("data.pkl", pickled), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"x/{name}", content)


def cyclic(path: Path) -> None:
    content: dict[str, object] = {"epoch": 3}
    content["model"] = content
    torch.save(content, path)


def expanded(path: Path) -> None:
    torch.save({"weight": torch.ones(1).expand(1 << 20, 1 << 20)}, path)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (deflated, "more than 2 MiB of pickle or compressed parts"),
        (nested, "no named tensors"),
        (cyclic, "no named tensors"),
        (expanded, "weight has a shape of more bytes"),
        (lambda path: torch.save({"x": torch.eye(2).to_sparse()}, path), "x is no plain tensor"),
        (lambda path: torch.jit.save(torch.jit.script(nn.ReLU()), str(path)), "convert it to safetensors"),
        (lambda path: torch.save({"x": RunsCode()}, path), "could run code"),
        (lambda path: path.write_bytes(pickle.dumps({"x": RunsCode()})), "no checkpoint of torch"),
        (lambda path: path.write_bytes(b"PK\x03\x04" + b"x" * 99), "truncated, or no checkpoint"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_hostile_pt_file_is_one_sentence_without_the_hints_of_torch(
    write, said: str, tmp_path: Path, capsys
) -> None:
    write(tmp_path / "x.pt")
    with pytest.raises(InputError) as caught:
        _ = Source.open(tmp_path / "x.pt").metas
    message = str(caught.value)
    assert said in message and message.isprintable() and len(message) < 400
    assert "weights_only" not in message and "trust" not in message
    assert "boom" not in capsys.readouterr().out


@pytest.mark.parametrize("mmap", [False, True])
def test_a_pickle_in_the_format_before_torch_1_6_is_not_read(mmap: bool, tmp_path: Path) -> None:
    """Also before an archive, which may begin anywhere in its file."""
    path, tensors = tmp_path / "x.pt", {"a": torch.ones(1)}
    torch.save(tensors, path)
    archive = path.read_bytes()
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes() + archive)
    rejects("no checkpoint of torch 1.6 or newer", read_pt, path, mmap)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), torch.float32), (-float("inf"), torch.float16), (float("nan"), torch.float8_e5m2)],
)
def test_nan_and_infinity_are_rejected_by_name(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    good, bad = torch.ones(64), torch.ones(3, 33)
    bad[2, 32] = value
    save_file({"good": good.to(dtype), "bad": bad.to(dtype)}, tmp_path / checkpoints.WEIGHTS)
    rejects(
        "model.safetensors: bad holds NaN or infinity",
        checkpoints.read_safetensors,
        tmp_path / checkpoints.WEIGHTS,
    )


def test_old_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    names = (
        ".state.pt.99999999.tmp",
        ".tmpAb3dE9",
        f".state.pt.{os.getpid()}.tmp",
        ".tmpnotes",
        "00000.safetensors",
    )
    for name in names:
        (tmp_path / name).write_bytes(b"half")
    files.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    for name in names:
        os.utime(tmp_path / name, (0, 0))
    files.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[2:])


FOLDERS: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "of another user": lambda f, patch: patch.setattr(os, "geteuid", lambda: f.stat().st_uid + 1),
    "that all can write": lambda f, _: f.chmod(0o777),
    "that all can replace": lambda f, _: f.parent.chmod(0o777),
    "that is a link": lambda f, _: (f.rename(f.with_name("elsewhere")), f.symlink_to("elsewhere")),
    "that is a file": lambda f, _: (f.rmdir(), f.write_text("a file")),
}


@pytest.mark.parametrize("placed", FOLDERS.values(), ids=FOLDERS)
def test_compiled_code_is_not_stored_in_a_folder_that_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placed
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "lanternpp"
    assert files.code_cache() == folder
    placed(folder, monkeypatch)
    files._temporary_cache.cache_clear()
    with pytest.warns(UserWarning, match="is not kept for the next run"):
        found = files.code_cache()
    assert found != folder and found.stat().st_mode & 0o077 == 0


def test_the_folder_of_compiled_code_is_closed_to_others(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "lanternpp").mkdir(mode=0o755)
    assert files.code_cache().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("given", ["", ".", "cache"])
def test_a_cache_folder_is_never_the_working_directory(tmp_path: Path, monkeypatch, given: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert files.user_cache() == Path.home() / ".cache" / "lanternpp"
    monkeypatch.setattr(os.path, "expanduser", str)  # as of a user whom the system does not know
    rejects("set HOME or XDG_CACHE_HOME", files.user_cache)


def test_on_windows_a_folder_is_locked_without_its_holders_name_and_the_cache_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_text(path: Path, text: str, encoding: str) -> None:
        raise PermissionError(13, "Permission denied")

    import filelock  # noqa: F401  # before the platform is another

    monkeypatch.setattr(files.sys, "platform", "win32")
    monkeypatch.setattr(Path, "write_text", write_text)  # the lock holds against a second handle too
    monkeypatch.delattr(os, "geteuid")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with files.locked(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()
    assert files.code_cache() == tmp_path / "cache" / "lanternpp"
