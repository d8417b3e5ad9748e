"""A model family of one's own on the command line: its module is named in the environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.documents import DOCS, blocks
from helpers.processes import commands, python
from PIL import Image

SAVE = """
from my_family import GreyTarget
from lanternpp.nn import checkpoints
checkpoints.save("grey-model/target", {"kind": "grey"}, GreyTarget().state_dict())
"""


@pytest.fixture
def grey(elsewhere: Path) -> Path:
    """A folder with the family of docs/extending.md and a model of it."""
    (text,) = (
        block.text for block in blocks(DOCS / "extending.md", "python") if block.title == "my_family.py"
    )
    (elsewhere / "my_family.py").write_text(text)
    assert python("-c", SAVE, cwd=elsewhere).returncode == 0
    return elsewhere


def test_it_draws_where_the_environment_names_its_module(grey: Path) -> None:
    draw = ("generate", "7", "--model", "grey-model", "--method", "ar", "-o", "7.png")
    refused = {
        "": "a model family of your own is known once its file is imported, which LANTERNPP_IMPORT",
        "no_family": "LANTERNPP_IMPORT 'no_family' cannot be imported: No module named 'no_family'",
    }
    for modules, said in refused.items():
        (((code, _, err),),) = commands([draw], grey, env={**os.environ, "LANTERNPP_IMPORT": modules})[1:]
        assert code == 2 and said in err and err.count("\n") == 1
    both = [draw, ("generate", "seven", *draw[2:])]
    ended = commands(both, grey, env={**os.environ, "LANTERNPP_IMPORT": "json, my_family"})[1]
    said = "lanternpp: error: the prompt is no digit\n"
    assert [(code, err) for code, _, err in ended] == [(0, ""), (2, said)]
    assert Image.open(grey / "7.png").size == (8, 8)
