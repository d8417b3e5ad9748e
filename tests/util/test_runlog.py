"""A run's log is read back to its last whole line."""

from pathlib import Path

import pytest

from lanternpp.errors import InputError
from lanternpp.util import runlog


def test_a_line_cut_short_is_taken_off_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert runlog.read_rows(path, int, "begin anew") == []
    runlog.append(path, {"n": 1})
    runlog.append(path, {"n": 2})
    whole = path.read_text()
    path.write_text(whole + '{"n": 3')
    assert runlog.read_rows(path, lambda row: row["n"], "begin anew") == [1, 2]
    assert path.read_text() == whole
    with pytest.raises(InputError, match=r"log.jsonl, line 1, is damaged: begin anew"):
        runlog.read_rows(path, lambda row: row["other"], "begin anew")


def test_rows_that_are_not_wanted_are_removed_with_a_last_piece(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 5, "loss": 1}\n{"step": 5, "validation": {}}\n{"step": 10, "loss": 2}\n{"ste')
    for path in (log, tmp_path / "none"):
        runlog.keep_rows(path, lambda row: row["step"] <= 5)
    assert log.read_text() == '{"step": 5, "loss": 1}\n{"step": 5, "validation": {}}\n'
