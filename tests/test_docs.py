"""The pages: their links lead somewhere, and what a release is made of says the same everywhere."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import nbformat
import pytest
import yaml
from helpers.documents import DOCS, LINK, ROOT, anchors, name, prose
from helpers.models import write_model
from nbclient import NotebookClient

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
MOST_LINES = {"README.md": 110, "CHANGELOG.md": 60}
MOST_WORDS = 14_000  # of docs/


class Loader(yaml.SafeLoader):
    """YAML as it is written: `on` is a word."""


Loader.yaml_implicit_resolvers = {}


def links(page: Path) -> list[str]:
    """The links of a page that lead to a file of this project."""
    return [link for link in LINK.findall(prose(page)) if "://" not in link]


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
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


def test_the_release_makes_every_link_of_the_first_page_absolute(tmp_path: Path) -> None:
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


def test_the_workflows_run_what_every_change_must_pass_and_upload_without_a_password() -> None:
    checks = yaml.load((ROOT / ".github/workflows/ci.yml").read_text(), Loader)
    assert ".ci/run" in [step.get("run") for step in checks["jobs"]["check"]["steps"]]
    upload = yaml.load((ROOT / ".github/workflows/publish.yml").read_text(), Loader)["jobs"]["upload"]
    assert upload["permissions"] == {"id-token": "write"} and upload["environment"] == "pypi"
    assert all("with" not in step for step in upload["steps"] if "pypi-publish" in step["uses"])


def test_the_citation_can_be_read() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["license"] == "Apache-2.0" and "version" not in citation  # __init__.py alone has it


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_a_notebook_runs_and_is_kept_without_outputs(path: Path, tmp_path: Path, monkeypatch) -> None:
    """On a tiny model: what the cell with the tag `parameters` sets is set again behind it."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    (place,) = (i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    assert re.findall(r"^(\w+) =", notebook.cells[place].source, re.M) == ["model", "n", "k"]
    tiny = f"model, n, k = {str(write_model(tmp_path / 'tiny'))!r}, 2, 4"
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(tiny))
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert any(output.output_type == "display_data" for cell in code for output in cell.outputs)


def test_every_file_that_the_architecture_names_is_there() -> None:
    page, source = (ROOT / "ARCHITECTURE.md").read_text(), ROOT / "src" / "lanternpp"
    named = set(re.findall(r"`((?:[\w]+/)*[\w.]+\.(?:py|c))`", page))
    missing = [path for path in named if not any(source.rglob(path)) and not (ROOT / path).exists()]
    assert named and not missing, f"ARCHITECTURE.md names {sorted(missing)}, which are no files"
