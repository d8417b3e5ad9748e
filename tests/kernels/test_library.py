"""The kernels are compiled once, into a folder that nobody else can write."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lanternpp.kernels import library as native
from lanternpp.nn import checkpoints

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch):
    assert native.kernels() is not None
    monkeypatch.setenv("LANTERNPP_KERNELS", "0")
    assert native.kernels() is None


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    yield tmp_path / "lanternpp"
    monkeypatch.undo()
    native.library.cache_clear()


def test_it_is_compiled_once(fresh: Path):
    assert native.library() is not None
    (made,) = fresh.glob("decoder-*.so")
    when = made.stat().st_mtime_ns
    native.library.cache_clear()
    assert native.library() is not None
    assert [file.stat().st_mtime_ns for file in fresh.iterdir()] == [when]


@pytest.mark.parametrize(
    ("vendor", "instructions", "widens"),
    [
        ("GenuineIntel", "avx512f avx512_bf16", True),
        ("GenuineIntel", "avx512f avx512_bf16 amx_bf16 amx_tile", False),
        ("GenuineIntel", "avx512f", False),
        ("AuthenticAMD", "avx512f avx512_bf16", False),
    ],
)
def test_weights_are_widened_where_products_of_bfloat16_are_slow(
    vendor: str, instructions: str, widens: bool
):
    flags = native.product_flags(f"vendor_id\t: {vendor}\nflags\t\t: fpu {instructions}\n")
    assert flags == (("-mno-avx512bf16",) if widens else ())


def test_without_a_compiler_a_warning_says_what_is_missing(fresh: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(fresh))
    with pytest.warns(UserWarning, match="no C compiler"):
        assert native.library() is None


def test_a_compiler_that_fails_is_named_and_leaves_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "FLAGS", ("--no-such-option",))
    monkeypatch.setattr(native.compiled, "__defaults__", (("--no-such-option",),))
    with pytest.warns(UserWarning, match="no-such-option"):
        assert native.library() is None
    assert not list(fresh.glob("*"))


def test_a_cache_folder_that_cannot_be_written_costs_a_warning(fresh: Path):
    fresh.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="is not kept for the next run"):
        assert native.library() is not None


@pytest.fixture
def planted(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands where the kernels would: a library that says that it was loaded."""
    source, proof = fresh.parent / "planted.c", fresh.parent / "loaded"
    monkeypatch.setenv("PROOF", str(proof))
    source.write_text(
        "#include <stdio.h>\n#include <stdlib.h>\n"
        '__attribute__((constructor)) static void run(void) { fopen(getenv("PROOF"), "w"); }\n'
    )
    made = native.compiled("cc")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
    return made


def of_another_user(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: planted.stat().st_uid + 1)


def in_a_folder_that_all_can_write(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.parent.chmod(0o777)


def in_a_folder_that_all_can_replace(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.parent.parent.chmod(0o777)


def behind_a_link(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.parent.rename(planted.parent.with_name("elsewhere"))
    planted.parent.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "placed",
    [of_another_user, in_a_folder_that_all_can_write, in_a_folder_that_all_can_replace, behind_a_link],
)
def test_a_library_that_others_may_have_planted_is_not_loaded(planted: Path, monkeypatch, placed):
    placed(planted, monkeypatch)
    with pytest.warns(UserWarning, match="is not kept for the next run"):
        found = native.library()
    assert found is not None and found.row_bytes(8, 1, 1) > 0
    assert not (planted.parent.parent / "loaded").exists()
    assert Path(found._name).parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("given", ["", ".", "cache"])
def test_a_cache_folder_is_never_the_working_directory(fresh: Path, monkeypatch: pytest.MonkeyPatch, given):
    monkeypatch.chdir(fresh.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert checkpoints.user_cache() == Path.home() / ".cache" / "lanternpp"


def test_a_file_that_is_a_link_is_compiled_anew_in_a_folder_of_this_user_alone(planted: Path):
    planted.rename(planted.with_name("elsewhere"))
    planted.symlink_to("elsewhere")
    planted.parent.chmod(0o755)
    assert native.library() is not None
    assert not (planted.parent.parent / "loaded").exists()
    assert planted.parent.stat().st_mode & 0o777 == 0o700
