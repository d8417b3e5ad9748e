"""The commands and the Python of the pages: all can be read, and those of the first pages are run, on a tiny model."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from cyclopts import App
from helpers.documents import DOCS, PAGES, ROOT, blocks, prose
from typer.core import TyperCommand
from typer.main import get_command

from lanternpp import Pipeline
from lanternpp.cli import app
from lanternpp.models import FAMILIES

RUN = [ROOT / "README.md", DOCS / "quickstart.md", DOCS / "extending.md"]
ELSEWHERE = {"--help", "--num_processes", "--pid"}  # of every verb, and of other programs


def name(page: Path) -> str:
    """A page as a test's name."""
    return str(page.relative_to(ROOT))


def test_every_command_of_the_pages_can_be_read(run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(TyperCommand, "invoke", lambda self, ctx: found.append(self.name))
    commands = [(block, args) for page in PAGES for block in blocks(page, "sh") for args in block.commands]
    for block, args in commands:
        if "--help" not in args:
            outcome = run(*args)
            assert outcome.code == 0, f"{name(block.page)}: lanternpp {' '.join(args)}: {outcome.err}"
    assert set(get_command(app).commands) <= set(found), "no page shows these commands"


def options() -> set[str]:
    """Every option of the command line."""
    verbs = dict(get_command(app).commands)
    every = [
        option for verb in verbs.values() for p in verb.params for option in (*p.opts, *p.secondary_opts)
    ]
    for stage in ("tokenizer", "target", "classifier"):
        recipe = App()
        recipe.default(import_module(stage).main)
        every += [option for argument in recipe.assemble_argument_collection() for option in argument.names]
    return {option for option in every if option.startswith("-")}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_option_that_a_page_names_is_there(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it also names those of earlier versions
    named = set(re.findall(r"`(--[a-z][\w-]*)", prose(page)))
    assert named - ELSEWHERE <= options()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_python_block_compiles(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block.text, name(page), "exec")


@pytest.mark.parametrize("page", RUN, ids=name)
def test_the_first_pages_do_what_they_say(page: Path, run, model, elsewhere: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(elsewhere), *sys.path])
    read = Pipeline.from_pretrained

    def tiny(name: str, **options: object) -> Pipeline:
        return read(model if name == "nature-128" else name, **({"dtype": "float32"} | options))

    monkeypatch.setattr(Pipeline, "from_pretrained", tiny)
    python = blocks(page, "python")
    monkeypatch.setitem(FAMILIES, "grey", "")  # what a page registers or imports is gone after the test
    for block in python:
        if block.title:
            (elsewhere / block.title).write_text(block.text)
            monkeypatch.setitem(sys.modules, Path(block.title).stem, sys)
            del sys.modules[Path(block.title).stem]
    shared: dict[str, object] = {}  # a page's blocks follow one another
    for block in python:
        if not block.title:
            exec(compile(block.text, name(page), "exec"), shared)
    monkeypatch.setattr(Pipeline, "from_pretrained", read)
    for block in blocks(page, "sh"):
        for args in block.commands:
            outcome = run(*args, "--model", model)
            assert outcome.code == 0, f"lanternpp {' '.join(args)}: {outcome.err}"
