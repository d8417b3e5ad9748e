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
