"""The structure of the source: the direction of imports, and the length of files.

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
from lanternpp.api.options import METHODS
from lanternpp.drafters import DRAFTERS
from lanternpp.models import FAMILIES
from lanternpp.proposers import PROPOSERS
from lanternpp.trees import SHAPES, TREES

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = "lanternpp"
MOST_LINES = 400

# What each room may import: rooms or single modules. A room may always import itself, and these.
ANYWHERE = {"errors", "types", "util", "nn.backend"}
LIBRARY = {"nn", "models", "accept", "trees", "drafters", "engine", "proposers", "api"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "util": set(),
    "nn": set(),
    "accept": set(),
    "trees": set(),
    "kernels": {"nn", "models.base", "engine.cache", "engine.decode", "engine.verify", "trees.static"},
    "models": {"nn"},
    "drafters": {"nn", "models.base", "models.latents"},
    "engine": {"accept.base", "trees.base", "models.base", "models.latents", "nn"},
    "proposers": {
        *("engine.proposer", "engine.cache", "engine.noise", "engine.sampling"),
        *("engine.verify", "engine.latents"),
        *("trees.base", "trees.static", "drafters", "models.base", "nn.decoder"),
    },
    "api": LIBRARY | {""},
    "jobs": LIBRARY | {""},
    "evaluation": LIBRARY,
    "training": {*LIBRARY, "evaluation.prompts", "evaluation.pictures"},
    "tuning": LIBRARY | {"evaluation"},
    "serve": {*LIBRARY, "evaluation.prompts", "jobs.cluster"},
    "cli": LIBRARY | {"training", "evaluation", "tuning", "jobs", "serve", ""},
    "__main__": {"cli"},
}
MOST_FLOORS = 10  # of rooms: steps of the longest chain of imports, without __main__
ONLY_TORCH = {"accept", "trees"}  # of packages of others
RECIPES = {path.stem for path in (SOURCE.parent / "recipes").rglob("*.py")} | {"recipes"}
# Files besides kernels/ that may name them, the sources in C, or ctypes.
NAMES_KERNELS = {
    "nn.backend": "lanternpp.kernels",
    "serve.new_thread": "ctypes",  # of Python's own threads
    "training.team": "ctypes",  # of the C library
}


def modules() -> dict[str, Path]:
    """Every module of the package by its name below the package; '' is the package itself."""
    found = {}
    for path in sorted(SOURCE.glob(f"{PACKAGE}/**/*.py")):
        parts = path.relative_to(SOURCE / PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()
TREES_OF = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports(name: str, body: ast.AST | None = None) -> Iterator[tuple[ast.stmt, str]]:
    """Each import statement of a module and a full name it reaches, such as `lanternpp.nn.decoder` or `torch`."""
    for node in ast.walk(body or TREES_OF[name]):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name}, line {node.lineno}: write imports in full"
            for alias in node.names:
                below = f"{node.module}.{alias.name}".removeprefix(f"{PACKAGE}.")
                yield node, f"{PACKAGE}.{below}" if below in MODULES else node.module


def ours(full: str) -> str | None:
    """The module below the package that a full name means, or None for a package of others."""
    return full.removeprefix(PACKAGE).lstrip(".") if full.split(".")[0] == PACKAGE else None


def room(name: str) -> str:
    """The folder or file right below the package."""
    return name.split(".")[0]


def may_import(name: str, full: str) -> bool:
    """Whether a module may import what has this full name; no module may import a recipe."""
    other, its_room = ours(full), room(name)
    if other is None:
        others = {"torch", *sys.stdlib_module_names} if its_room in ONLY_TORCH else None
        return full.split(".")[0] not in RECIPES and (others is None or full.split(".")[0] in others)
    allowed = MAY_IMPORT[its_room] | {its_room, *ANYWHERE}
    return other in allowed or any(other.startswith(f"{entry}.") for entry in allowed if entry)


def test_imports_go_down() -> None:
    wrong = [
        f"{MODULES[name]}:{node.lineno}: {room(name)} may not import {full}"
        for name in MODULES
        if name  # the package's own file names the public parts and loads them lazily
        for node, full in imports(name)
        if not may_import(name, full)
    ]
    assert not wrong, "\n".join(["imports in the wrong direction:", *wrong])


def test_there_is_no_import_cycle() -> None:
    reached = {name: {ours(full) for _, full in imports(name)} - {None, "", name} for name in MODULES if name}
    try:
        TopologicalSorter(reached).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(error.args[1]))


def test_the_longest_chain_of_imports_between_rooms_is_short() -> None:
    graph: dict[str, set[str]] = {}
    for name in MODULES:
        for statement in TREES_OF[name].body if name else ():
            if not is_type_checking(statement):
                found = (ours(full) for _, full in imports(name, statement))
                graph.setdefault(room(name), set()).update(room(other) for other in found if other)
    floors: dict[str, int] = {}
    for name in TopologicalSorter({name: to - {name} for name, to in graph.items()}).static_order():
        floors[name] = 1 + max((floors[other] for other in graph.get(name, ()) if other != name), default=0)
    del floors["__main__"]
    assert max(floors.values()) <= MOST_FLOORS, sorted(floors.items(), key=lambda item: item[1])


def test_only_one_line_names_the_kernels() -> None:
    words = re.compile(r"lanternpp\.kernels|\bctypes\b|csrc")
    texts = {
        name: path.read_text(encoding="utf-8") for name, path in MODULES.items() if room(name) != "kernels"
    }
    named = {name: " ".join(sorted(set(words.findall(text)))) for name, text in texts.items()}
    assert {name: found for name, found in named.items() if found} == NAMES_KERNELS
    assert sum("lanternpp.kernels" in line for line in texts["nn.backend"].splitlines()) == 1


def test_the_engine_names_no_method() -> None:
    names = {*METHODS, *RULES, *PROPOSERS, *DRAFTERS, *FAMILIES, *SHAPES, *TREES}
    wrong = [
        f"{MODULES[name]}:{node.lineno}: the engine names {node.value!r}; ask the object instead"
        for name in MODULES
        if room(name) == "engine"
        for node in ast.walk(TREES_OF[name])
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not wrong, "\n".join(wrong)


def is_type_checking(node: ast.stmt) -> bool:
    """`if TYPE_CHECKING:`, which never runs."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES.values()}
    long = [f"{p.relative_to(SOURCE)}: {n} lines" for p, n in lengths.items() if n > MOST_LINES]
    assert not long, f"more than {MOST_LINES} lines is a sign of two ideas in one file: {', '.join(long)}"
