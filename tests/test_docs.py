"""The pages: links are valid, commands and Python can be parsed, and those of the first pages run, on a tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from cyclopts import App
from helpers.commands import empty_dir, run
from helpers.documents import DOCS, LINK, PAGES, ROOT, anchors, blocks, name, prose
from helpers.families import write_sketch
from helpers.models import write_model
from nbclient import NotebookClient

from lanternpp import Pipeline
from lanternpp.cli import VERBS
from lanternpp.evaluation.papers import PAPERS
from lanternpp.evaluation.race import parse_methods
from lanternpp.models import FAMILIES
from lanternpp.models.transformers import CLASSES
from lanternpp.serve.schemas import ImagesRequest

__all__ = ["empty_dir", "run"]
RUN = [ROOT / "README.md", DOCS / "quickstart.md", DOCS / "extending.md"]
OTHER_OPTIONS = {"--help", "--num_processes", "--pid"}  # of every verb, and of other programs
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
MOST_LINES = {"README.md": 110, "CHANGELOG.md": 60}
MOST_WORDS = 14_000  # of docs/


class Loader(yaml.SafeLoader):
    """YAML without types: `on` is a string."""


Loader.yaml_implicit_resolvers = {}


def links(page: Path) -> list[str]:
    """The links of a page that lead to a file of this project."""
    return [link for link in LINK.findall(prose(page)) if "://" not in link]


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=name)
def test_every_link_is_to_a_file_and_a_heading(page: Path) -> None:
    """Of pages outside docs/, whose links MkDocs checks."""
    for link in links(page):
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.is_file(), f"{name(page)} links to {link}, which is no file"
        assert not anchor or anchor in anchors(there), f"{name(page)} links to {link}, which is no heading"


def test_the_pages_are_short() -> None:
    for page, most in MOST_LINES.items():
        assert len((ROOT / page).read_text().splitlines()) <= most, page
    assert sum(len(page.read_text().split()) for page in DOCS.glob("*.md")) <= MOST_WORDS


def test_the_release_makes_every_link_of_the_readme_absolute(tmp_path: Path) -> None:
    """PyPI shows the README alone, without the files that it links to."""
    workflow = yaml.load((ROOT / ".github/workflows/publish.yml").read_text(), Loader)
    steps = [step["run"] for step in workflow["jobs"]["sdist"]["steps"] if "README.md" in step.get("run", "")]
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    where = {"GITHUB_REPOSITORY": "owner/name", "GITHUB_REF_NAME": "v9"}
    subprocess.run(["bash", "-ec", steps[0]], cwd=tmp_path, check=True, env=os.environ | where, timeout=60)
    pictures = re.findall(r"!\[[^]]*\]\(([^()]+)\)", (tmp_path / "README.md").read_text())
    assert pictures == ["https://raw.githubusercontent.com/owner/name/v9/docs/demo.png"]
    pages = set(LINK.findall((tmp_path / "README.md").read_text())) - set(pictures)
    relative = {link for link in links(ROOT / "README.md") if not link.endswith(".png")}
    assert pages == {f"https://github.com/owner/name/blob/v9/{link}" for link in relative}


def test_the_workflows_run_the_checks_and_upload_without_a_password() -> None:
    checks = yaml.load((ROOT / ".github/workflows/ci.yml").read_text(), Loader)
    assert ".ci/run" in [step.get("run") for step in checks["jobs"]["check"]["steps"]]
    upload = yaml.load((ROOT / ".github/workflows/publish.yml").read_text(), Loader)["jobs"]["upload"]
    assert upload["permissions"] == {"id-token": "write"} and upload["environment"] == "pypi"
    assert all("with" not in step for step in upload["steps"] if "pypi-publish" in step["uses"])


def test_the_citation_is_valid() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["license"] == "Apache-2.0" and "version" not in citation  # __init__.py alone has it


def test_notebooks_run_and_are_stored_without_outputs(tmp_path: Path, monkeypatch) -> None:
    """On a tiny model: the parameters of the cell with the tag `parameters` are set again after it. One process runs all, each
    without the names of those before."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    new, together, shown = nbformat.v4.new_code_cell, nbformat.v4.new_notebook(), []
    tiny = f"model, n, k = {str(write_model(tmp_path / 'tiny'))!r}, 2, 4"
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, 4)
        nbformat.validate(notebook)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert all(not cell.outputs and cell.execution_count is None for cell in code)
        (place,) = (i for i, cell in enumerate(code) if "parameters" in cell.metadata.get("tags", []))
        assert re.findall(r"^(\w+) =", code[place].source, re.M) == ["model", "n", "k"]
        together.cells += [new("%reset -f"), *code[: place + 1], new(tiny), *code[place + 1 :]]
        shown.append(code)
    NotebookClient(together, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for code in shown:
        assert any(output.output_type == "display_data" for cell in code for output in cell.outputs)


def test_every_file_that_the_architecture_names_exists() -> None:
    page, source = (ROOT / "ARCHITECTURE.md").read_text(), ROOT / "src" / "lanternpp"
    named = set(re.findall(r"`((?:[\w]+/)*[\w.]+\.(?:py|c))`", page))
    missing = [path for path in named if not any(source.rglob(path)) and not (ROOT / path).exists()]
    assert named and not missing, f"ARCHITECTURE.md names {sorted(missing)}, which are no files"


def test_every_command_of_the_pages_can_be_parsed(run, monkeypatch: pytest.MonkeyPatch) -> None:
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
    row = re.search(r'`--methods "(.*?)"`', prose(page))[1]
    assert all(entry in parse_methods(PAPERS["lantern++-llamagen"].methods) for entry in parse_methods(row))
    for called, figures in re.findall(r"^\| `(\w[\w+-]*)` \| (.*) \|$", prose(page), re.M):
        methods = {entry.method for entry in parse_methods(PAPERS[called].methods)}
        assert set(re.findall(r"`([^`]+)`", figures)) == methods - {"ar"}


def test_the_page_on_serving_names_every_field_of_a_request() -> None:
    section = (DOCS / "serving.md").read_text().partition("## Requests")[2].partition("images/edits")[0]
    named = set(re.findall(r"`(\w+)`", section))
    rows = set(re.findall(r"`(\w+)`", str(re.findall(r"\n\| (`.*?) \|", section))))
    assert rows and rows <= ImagesRequest.model_fields.keys() <= named


def test_every_option_that_a_page_names_exists(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    models = [f"models {command}" for command in ("list", "download", "convert", "warm")]
    shown = [
        run(*command.split(), "--help").out
        for command in (*VERBS, *models, "tokenizer", "target", "classifier")
    ]
    known = set(re.findall(r"--[a-z][\w-]*", " ".join(shown))) | OTHER_OPTIONS
    for page in PAGES:
        if page.name != "CHANGELOG.md":  # it also names those of earlier versions
            assert set(re.findall(r"`(--[a-z][\w-]*)", prose(page))) <= known, page


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_python_block_compiles(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block.text, name(page), "exec")


@pytest.mark.parametrize("page", RUN, ids=name)
def test_code_and_commands_of_the_first_pages_run(
    page: Path, run, model, empty_dir: Path, monkeypatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(empty_dir), *sys.path])
    read = Pipeline.from_pretrained

    def tiny(name: str, **options: object) -> Pipeline:
        return read(model if name == "nature-128" else name, **({"dtype": "float32"} | options))

    monkeypatch.setattr(Pipeline, "from_pretrained", tiny)
    python = blocks(page, "python")
    for entry, table in (("grey", FAMILIES), ("sketch", FAMILIES), ("LlamaForCausalLM", CLASSES)):
        monkeypatch.setitem(table, entry, "")  # what a page registers or imports is gone after the test
    if "my_sketch.py" in [block.title for block in python]:
        write_sketch(empty_dir / "sketch")
    for block in python:
        if block.title:
            (empty_dir / block.title).write_text(block.text)
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
