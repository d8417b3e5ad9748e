"""The commands and the Python of the pages: all can be read, and those of the first pages are run, on a tiny model."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from cyclopts import App
from helpers.documents import DOCS, PAGES, ROOT, blocks, name, prose
from helpers.families import write_sketch

from lanternpp import Pipeline
from lanternpp.cli import VERBS
from lanternpp.evaluation.papers import PAPERS
from lanternpp.evaluation.race import parse_methods
from lanternpp.models import FAMILIES
from lanternpp.models.transformers import CLASSES

RUN = [ROOT / "README.md", DOCS / "quickstart.md", DOCS / "extending.md"]
ELSEWHERE = {"--help", "--num_processes", "--pid"}  # of every verb, and of other programs


def apps(app: App) -> Iterator[App]:
    """A verb and its subcommands."""
    yield app
    for command in app:
        if not command.startswith("-"):
            yield from apps(app[command])


def verbs() -> Iterator[App]:
    """Every verb, and the recipes."""
    for verb in VERBS:
        made = getattr(import_module(f"lanternpp.cli.{verb}"), verb)
        yield made if isinstance(made, App) else App(default_command=made)
    for stage in ("tokenizer", "target", "classifier"):
        yield App(default_command=import_module(stage).main)


def test_every_command_of_the_pages_can_be_read(run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()

    def read(app: App, tokens: list[str]) -> None:
        app.parse_args(tokens, print_error=False, exit_on_error=False)
        found.add(tokens[0])

    monkeypatch.setattr(App, "__call__", read)
    commands = [(block, args) for page in PAGES for block in blocks(page, "sh") for args in block.commands]
    for block, args in commands:
        if "--help" not in args:
            outcome = run(*args)
            assert outcome.code == 0, f"{name(block.page)}: lanternpp {' '.join(args)}: {outcome.err}"
    assert set(VERBS) <= found, "no page shows these commands"


def test_the_page_on_papers_has_a_command_for_each_and_figures_of_its_own_methods() -> None:
    page = DOCS / "reproduce.md"
    commands = [args for block in blocks(page, "sh") for args in block.commands]
    shown = {args[args.index("--paper") + 1] for args in commands if "--paper" in args}
    assert shown == PAPERS.keys() - {"eagle2-llamagen"}, "whose row is one of lantern-llamagen"
    for args in commands:
        if "--methods" in args:
            paper = PAPERS[args[args.index("--paper") + 1]]
            row = parse_methods(args[args.index("--methods") + 1])
            assert row[1:] and all(entry in parse_methods(paper.methods) for entry in row)
    for called, figures in re.findall(r"^\| `(\w[\w+-]*)` \| (.*) \|$", prose(page), re.M):
        methods = {entry.method for entry in parse_methods(PAPERS[called].methods)}
        assert set(re.findall(r"`([^`]+)`", figures)) == methods - {"ar"}


def options() -> set[str]:
    """Every option of the command line."""
    every = {
        option
        for verb in verbs()
        for app in apps(verb)
        for argument in app.assemble_argument_collection()
        for option in argument.names
    }
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
    for entry, table in (("grey", FAMILIES), ("sketch", FAMILIES), ("LlamaForCausalLM", CLASSES)):
        monkeypatch.setitem(table, entry, "")  # what a page registers or imports is gone after the test
    if "my_sketch.py" in [block.title for block in python]:
        write_sketch(elsewhere / "sketch")
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
