"""The table of codebook neighbours, and the file that keeps it for the next run."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from lanternpp.models.vq import codes as module
from lanternpp.models.vq.codes import neighbours
from lanternpp.nn import checkpoints
from lanternpp.nn.files import files
from lanternpp.util.terminal import progress_bar

BOOK = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def test_the_nearest_codes_come_first_and_are_read_from_the_file_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = neighbours(BOOK, 4, tmp_path / "new")
    far = torch.cdist(BOOK, BOOK).fill_diagonal_(float("inf"))
    assert torch.equal(table, far.argsort(-1)[:, :4].int())
    monkeypatch.delattr(torch, "cdist")
    assert torch.equal(neighbours(BOOK, 4, tmp_path / "new"), table)
    torch.save({"book": BOOK}, tmp_path / "new" / "weights.bin")
    assert [path.name for path in files(tmp_path / "new")] == ["weights.bin"]


@pytest.mark.parametrize("damage", [b"", b"half a file", None])
def test_a_damaged_file_is_written_again(damage: bytes | None, tmp_path: Path) -> None:
    table = neighbours(BOOK, 4, tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077, "others may read it as far as the umask allows"
    content = file.read_bytes()
    file.write_bytes(content[:-8] if damage is None else damage)
    assert torch.equal(neighbours(BOOK, 4, tmp_path), table)
    assert file.read_bytes() == content


def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.warns(UserWarning, match="the disk is full"):
        table = neighbours(BOOK, 4, tmp_path)
    assert torch.equal(table, neighbours(BOOK, 4)) and not list(tmp_path.iterdir())


def test_a_large_table_has_a_second_progress_bar(monkeypatch, capsys) -> None:
    monkeypatch.setattr(module, "MIN_PROGRESS_CODES", 1)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("drawing"):
        neighbours(BOOK, 7)
    shown = capsys.readouterr().err
    assert "drawing" in shown and "codebook neighbours" in shown


def test_a_package_behind_a_link_keeps_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(Path(module.__file__).parents[2])
    monkeypatch.setattr(module, "__file__", str(tmp_path / "link/models/vq/codes.py"))
    assert module.cache_folder(tmp_path / "link/assets/nature-128").name == "lanternpp"
