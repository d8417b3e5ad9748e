"""JSON of any origin is read or rejected in a sentence; values follow a schema; a log is read to its last complete line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Len
from helpers.refusals import rejects

from lanternpp.errors import MAX_MESSAGE_CHARS, InputError
from lanternpp.util import jsonfile
from lanternpp.util.jsonfile import (
    MAX_DEPTH,
    Between,
    append_row,
    keep_rows,
    read_json,
    read_object,
    read_rows,
    validated,
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 100_000 + b"]" * 100_000, f"nests lists and objects more than {MAX_DEPTH} deep"),
        (b"[" * 70 + b"]" * 70, f"nests lists and objects more than {MAX_DEPTH} deep"),
        (b'{"a": ' + b"1" * 5000 + b"}", "a number of too many digits"),
        (b'{"a": "\xff"}', "no text in UTF-8 (byte 7)"),
        ("{}".encode("utf-16"), "no text in UTF-8"),
        (b"{", "is not valid JSON"),
        (b"", "is not valid JSON"),
    ],
)
def test_unreadable_files_are_rejected(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_json(path)
    assert said in str(caught.value) and str(path) in str(caught.value)
    assert str(caught.value).endswith("restore it from its source.") and str(caught.value).isprintable()


def test_only_plain_files_of_limited_size_are_read(tmp_path: Path, monkeypatch) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", tmp_path, tmp_path / "none.json"):
        rejects(r"is missing|is no plain file", read_json, path)
    rejects("File name too long", read_json, tmp_path / f"{'x' * 5000}.json")
    (tmp_path / "list.json").write_text("[1, 2]")
    rejects("holds a list, where a JSON object is expected", read_object, tmp_path / "list.json")
    monkeypatch.setattr(jsonfile.read_json, "__defaults__", (jsonfile.REMEDY, 3))
    rejects("larger than", read_object, tmp_path / "list.json")


def test_a_sentence_is_one_line_that_a_terminal_can_show() -> None:
    said = str(InputError("a name \x1b[2J\nof \ud800 two\r\nlines\t!" + "x" * 10_000 + " the end"))
    assert said.startswith("a name \\x1b[2J of \\ud800 two lines !") and said.endswith("the end")
    assert len(said) < MAX_MESSAGE_CHARS + 50 and said.isprintable()


@dataclass(frozen=True)
class Inner:
    side: Annotated[int, Between(1, 8)]


@dataclass(frozen=True)
class Outer:
    width: Annotated[int, Between(1, 64)]
    rate: float = 0.5
    name: Annotated[str, Len(1, 5)] | int | None = None
    kind: Literal["one", "two"] = "one"
    stages: Annotated[tuple[Annotated[int, Between(0, 9)], ...], Len(1, 3)] = (1,)
    inner: Inner | None = None
    loud: bool = False


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "width is missing"),
        ({"width": "32"}, "width '32' cannot be used: it should be a valid integer"),
        ({"width": True}, "width True cannot"),
        ({"width": 0}, "width 0 cannot be used: it should be greater than or equal to 1"),
        ({"width": 1, "rate": float("nan")}, "should be a finite number"),
        ({"width": 1, "rate": 10**400}, "should be a finite number"),
        ({"width": 1, "name": "123456"}, "'123456' cannot be used: it should be a valid integer"),
        ({"width": 1, "stages": [1, -1]}, "stages[1] -1 cannot be used: it should be greater than or equal"),
        ({"width": 1, "inner": {}}, "inner.side is missing"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        validated("", values, Outer)
    assert said in str(caught.value)


def test_valid_values_become_the_dataclass() -> None:
    given = {"width": 8, "rate": 2, "name": "abc", "stages": [1, 2], "inner": {"side": 4}}
    given |= {"unknown": 1, "loud": None}
    assert validated("", given, Outer) == Outer(8, 2, "abc", "one", (1, 2), Inner(4))


def test_an_incomplete_last_line_is_removed_and_a_damaged_one_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert read_rows(path, int, "begin anew") == []
    append_row(path, {"n": 1})
    append_row(path, {"n": 2})
    complete = path.read_text()
    path.write_text(complete + '{"n": 3')
    assert read_rows(path, lambda row: row["n"], "begin anew") == [1, 2]
    assert path.read_text() == complete
    rejects(
        "log.jsonl, line 1, is damaged: begin anew", read_rows, path, lambda row: row["other"], "begin anew"
    )


def test_unwanted_rows_and_an_incomplete_last_line_are_removed(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 5, "loss": 1}\n{"step": 5, "validation": {}}\n{"step": 10, "loss": 2}\n{"ste')
    for path in (log, tmp_path / "none"):
        keep_rows(path, lambda row: row["step"] <= 5)
    assert log.read_text() == '{"step": 5, "loss": 1}\n{"step": 5, "validation": {}}\n'
