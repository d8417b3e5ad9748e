"""The shape of the source: which way imports flow, how long files are, and that what is public is explained.

A room is a folder of `lanternpp`, or one of its files. The tests read the imports with `ast`, wherever in a
file they stand.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from lanternpp.accept import RULES
from lanternpp.drafters import DRAFTERS
from lanternpp.methods import METHODS
from lanternpp.proposers import PROPOSERS
from lanternpp.targets import FAMILIES
from lanternpp.trees import SHAPES, TREES

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = "lanternpp"
MOST_LINES = 400

LIBRARY = {"errors", "types", "registry", "devices", "methods", "nn", "vq", "accept", "trees", "targets"}
LIBRARY |= {"drafters", "proposers", "engine", "hub", "models", "settings", "tuned", "pipeline", "picture"}
LIBRARY |= {
    "continuous",
    "names",
    "progress",
    "cluster",
    "default_method",
    "fit",
    "results",
    "arguments",
    "engines",
    "published",
    "runlog",
    "keywords",
    "loaded",
    "compiled",
    "pixels",
}

# What each room may import: rooms or single modules. A room may always import itself, and these.
ANYWHERE = {"errors", "schema", "jsonfile", "dials", "backend"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "schema": set(),
    "jsonfile": set(),
    "dials": set(),
    "types": set(),
    "runlog": {"nn.checkpoints"},
    "registry": set(),
    "names": set(),
    "progress": set(),
    "cluster": set(),
    "devices": set(),
    "methods": {"registry"},
    "nn": {"types"},
    "backend": {"types"},
    "kernels": {"nn", "types", "targets.base", "engine.decode", "engine.proposer", "engine.verifiers"},
    "vq": {"nn", "progress"},
    "accept": {"types"},
    "trees": {"types", "registry"},
    "targets": {"nn", "vq", "types"},
    "drafters": {"nn", "targets.base", "types"},
    "engine": {"accept.base", "accept.variation", "trees.base", "targets.base", "nn", "types", "devices"},
    "proposers": {
        *("engine.proposer", "engine.cache", "engine.guidance", "engine.noise", "engine.sampling"),
        *("engine.block", "engine.verify"),
        *("trees.base", "trees.chain", "drafters.base", "targets.base", "nn.decoder", "registry", "types"),
    },
    "continuous": {
        *("engine", "accept.base", "targets", "vq", "nn", "types"),
        *("proposers.network", "proposers.no_draft", "proposers.tree", "drafters.eagle"),
    },
    "settings": {
        *("arguments", "registry", "methods", "accept", "trees", "proposers", "engine.verifiers"),
        *("engine.proposer", "engine.block", "drafters.base", "targets.base", "continuous.mixture"),
    },
    "hub": set(),
    "models": {"registry", "hub", "devices", "targets", "drafters", "nn"},
    "tuned": {"nn", "trees", "vq"},
    "default_method": {"registry", "methods", "models", "drafters", "nn", "settings", "tuned"},
    "fit": {"devices", "methods", "models", "nn", "registry", "settings", "trees", "types", "engine", ""},
    "pixels": {"registry", "targets.base"},
    "results": {"engine", "pixels", "targets.base", ""},
    "keywords": {"accept.base", "engine.proposer", "results", "trees.base"},
    "loaded": LIBRARY - {"pipeline", "loaded", "picture", "pixels"},
    "arguments": set(),
    "published": set(),
    "engines": {"engine", "settings"},
    "compiled": {"engine.decode", "engines", "nn"},
    "picture": {"nn.checkpoints"},
    "pipeline": LIBRARY - {"pipeline", "picture"},
    "inplace": LIBRARY,
    "training": {*LIBRARY, "evaluation.classifier", "evaluation.pictures", "evaluation.prompts"},
    "evaluation": LIBRARY,
    "tuning": LIBRARY | {"evaluation"},
    "many": LIBRARY,
    "serve": {*LIBRARY, "evaluation.prompts"},
    "cli": LIBRARY | {"training", "evaluation", "tuning", "many", "serve", ""},
    "__main__": {"cli"},
}
ONLY_TORCH = {"accept", "trees"}
# Files besides kernels/ that may name them, the sources in C, or ctypes.
NAMES_KERNELS = {
    "backend": "lanternpp.kernels",
    "serve.fresh_thread": "ctypes",  # of Python's own threads
}
QUICK = [
    "arguments",
    "cli",
    "dials",
    "errors",
    "jsonfile",
    "methods",
    "names",
    "progress",
    "registry",
    "schema",
]  # loaded before help is shown
HEAVY = {"torch", "transformers", "numpy", "PIL", "safetensors", "huggingface_hub"}


def modules() -> dict[str, Path]:
    """Every module of the package by its name below the package; '' is the package itself."""
    found = {}
    for path in sorted(SOURCE.glob(f"{PACKAGE}/**/*.py")):
        parts = path.relative_to(SOURCE / PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()
TREES_OF = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def where(name: str, node: ast.AST) -> str:
    """file:line of a node, for a failure's message."""
    return f"{MODULES[name].relative_to(SOURCE.parent)}:{getattr(node, 'lineno', 1)}"


def imports(name: str, body: ast.AST | None = None) -> Iterator[tuple[ast.AST, str]]:
    """Each import statement of a module and a full name it reaches, such as `lanternpp.nn.rope` or `torch`."""
    for node in ast.walk(body or TREES_OF[name]):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{where(name, node)}: write imports in full"
            for alias in node.names:
                below = f"{node.module}.{alias.name}".removeprefix(f"{PACKAGE}.")
                yield node, f"{PACKAGE}.{below}" if below in MODULES else node.module


def ours(full: str) -> str | None:
    """The module below the package that a full name means, or None for a package of others."""
    if full.split(".")[0] != PACKAGE:
        return None
    return full.removeprefix(PACKAGE).lstrip(".")


def room(name: str) -> str:
    """The folder or file right below the package."""
    return name.split(".")[0]


def inside(name: str, allowed: set[str]) -> bool:
    """Whether a module is one of these, or lies in a room of these."""
    return name in allowed or any(name.startswith(f"{entry}.") for entry in allowed if entry)


def test_every_room_has_its_row() -> None:
    unlisted = {room(name) for name in MODULES} - MAY_IMPORT.keys() - {""}
    assert not unlisted, f"say in MAY_IMPORT what these rooms may import: {', '.join(sorted(unlisted))}"


def test_imports_flow_one_way() -> None:
    wrong = [
        f"{where(name, node)}: {room(name)} may not import {full}"
        for name in MODULES
        if name  # the package's own file names the public parts and loads them lazily
        for node, full in imports(name)
        if (other := ours(full)) is not None
        and not inside(other, MAY_IMPORT[room(name)] | {room(name), *ANYWHERE})
    ]
    assert not wrong, "\n".join(["imports against the arrows:", *wrong])


def test_no_import_cycle() -> None:
    graph = {
        name: {other for _, full in imports(name) if (other := ours(full)) is not None and other != name}
        for name in MODULES
        if name
    }
    try:
        TopologicalSorter({name: reached - {""} for name, reached in graph.items()}).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(error.args[1]))


def test_one_line_names_the_kernels() -> None:
    words = re.compile(r"lanternpp\.kernels|\bctypes\b|csrc")
    named = [
        (name, sorted({found[0] for line in lines for found in [words.search(line)] if found}), lines)
        for name, path in MODULES.items()
        if room(name) != "kernels" and (lines := path.read_text(encoding="utf-8").splitlines())
    ]
    assert {name: " ".join(found) for name, found, _ in named if found} == NAMES_KERNELS
    (lines,) = (lines for name, _, lines in named if name == "backend")
    assert sum("lanternpp.kernels" in line for line in lines) == 1


@pytest.mark.parametrize("only", sorted(ONLY_TORCH))
def test_rules_and_trees_need_nothing_but_torch(only: str) -> None:
    wrong = [
        f"{where(name, node)}: {only} may not import {full}"
        for name in MODULES
        if room(name) == only
        for node, full in imports(name)
        if full.split(".")[0] not in {PACKAGE, "torch", *sys.stdlib_module_names}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_engine_names_no_method() -> None:
    names = {*METHODS, *RULES, *PROPOSERS, *DRAFTERS, *FAMILIES, *SHAPES, *TREES}
    wrong = [
        f"{where(name, node)}: the engine names {node.value!r}; ask the object instead"
        for name in MODULES
        if room(name) == "engine"
        for node in ast.walk(TREES_OF[name])
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not wrong, "\n".join(wrong)


def test_help_loads_nothing_heavy() -> None:
    wrong = [
        f"{where(name, node)}: import {full} inside the function that needs it"
        for name in MODULES
        if room(name) in QUICK or name == ""
        for statement in TREES_OF[name].body
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef) and not is_type_checking(statement)
        for node, full in imports(name, statement)
        if full.split(".")[0] in HEAVY
        or ((other := ours(full)) is not None and room(other) not in {*QUICK, ""})
    ]
    assert not wrong, "\n".join(wrong)


def is_type_checking(node: ast.stmt) -> bool:
    """`if TYPE_CHECKING:`, which never runs."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_no_file_is_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES.values()}
    long = [f"{p.relative_to(SOURCE)}: {n} lines" for p, n in lengths.items() if n > MOST_LINES]
    assert not long, f"more than {MOST_LINES} lines is a sign of two ideas in one file: {', '.join(long)}"


def public(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Public classes, functions and methods; not what is inside functions."""
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name.startswith("_") or is_overload(child):
                continue
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{prefix}{child.name}.")


def is_overload(node: ast.AST) -> bool:
    """A typing.overload, whose implementation explains it."""
    return any(ast.unparse(d).endswith("overload") for d in getattr(node, "decorator_list", []))


def test_what_is_public_is_explained() -> None:
    wrong = [
        f"{where(name, node)}: {label} has no docstring"
        for name, tree in TREES_OF.items()
        for label, node in [("the file", tree), *public(tree)]
        if not ast.get_docstring(node)  # type: ignore[arg-type]
    ]
    assert not wrong, "\n".join(wrong)
