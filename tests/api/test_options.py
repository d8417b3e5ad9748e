"""A dial is declared once: one line in `api/options.py` puts it everywhere, as `docs/extending.md` shows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from helpers.documents import DOCS, blocks
from helpers.processes import python

import lanternpp

DIAL, RULE = (block.text for block in blocks(DOCS / "extending.md", "py"))
SCRIPT = f"""
import inspect, json, sys
from dataclasses import asdict
from lanternpp import Pipeline
from lanternpp.accept.exact import Exact
from lanternpp.api.options import names, DraftDials, RuleDials, METHODS
from lanternpp.api.settings import build_rule, resolve
from lanternpp.errors import InputError
from lanternpp.serve.page import PAGE_DIALS, dial_row
from lanternpp.serve.schemas import ImagesRequest

{RULE}

settings = resolve("eagle", {{}}, {{"accept": Grainy, "grain": 0.5}})
try:
    resolve("eagle", {{}}, {{"accept": Grainy, "grain": 2}})
except InputError as error:
    refused = str(error)
print(json.dumps({{
    "keyword": str(inspect.signature(Pipeline.__call__).parameters["grain"]),
    "schema": ImagesRequest.model_json_schema()["properties"]["grain"],
    "page": [dial_row(None, dial) for dial in PAGE_DIALS if dial.name == "grain"],
    "settings": asdict(settings)["grain"],
    "part": build_rule(settings, lambda k: None).grain,
    "refused": refused,
}}))
"""


def test_a_dial_in_one_place_is_an_option_everywhere(tmp_path: Path) -> None:
    package = Path(lanternpp.__file__).parent
    copy = tmp_path / "lanternpp"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("nature-*", "lib", "__pycache__"))
    declared = copy / "api" / "options.py"
    before, rule, after = declared.read_text().partition('    """The dials of an acceptance rule."""\n\n')
    declared.write_text(f"{before}{rule}    {DIAL}{after}")

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "LANTERNPP_KERNELS": "0"}
        return python(*args, env=environment)

    assert "--grain FLOAT" in run("-m", "lanternpp", "generate", "--help").stdout
    wrong = run("-m", "lanternpp", "generate", "x", "--grain", "2")
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "lanternpp: error: --grain 2.0 is out of range; use 0 to 1\n",
    )
    done = run("-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["keyword"] == "grain: float | None = None"
    number = found["schema"]["anyOf"][0]
    assert (number["type"], number["minimum"], number["maximum"]) == ("number", 0, 1)
    assert found["schema"]["description"] == "How coarse."
    assert [(row["label"], row["high"]) for row in found["page"]] == [("Grain", 1)]
    assert (found["settings"], found["part"]) == (0.5, 0.5)
    assert found["refused"] == "grain 2.0 is out of range; use 0 to 1"
