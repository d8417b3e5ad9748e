"""Tree builders, and the shapes that can be named."""

from __future__ import annotations

import json
from pathlib import Path

from lanternpp.errors import InputError
from lanternpp.registry import find, unknown
from lanternpp.trees.base import TreeBuilder
from lanternpp.trees.shapes import SHAPES, check
from lanternpp.trees.static import StaticTree

TREES: dict[str, str] = {
    "eagle2": "lanternpp.trees.dynamic:DynamicTree",
    "ddd": "lanternpp.trees.depth:DepthTree",
}


def build_tree(name: str) -> TreeBuilder:
    """A builder by name: a shape's name, a JSON file of paths, or "package.module:Class"."""
    if name in SHAPES:
        return StaticTree(SHAPES[name])
    if name.endswith(".json"):
        return StaticTree(read_shape(Path(name)))
    if name in TREES or ":" in name:
        return find("tree", name, TREES)()
    raise InputError(unknown("tree", name, [*SHAPES, *TREES]) + ", or a .json file with a list of paths")


def read_shape(path: Path) -> tuple[tuple[int, ...], ...]:
    """A shape from a JSON file: a list of paths, each a list of child ranks."""
    try:
        paths = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"tree file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"tree file {path} is not JSON: {error}") from None
    return check(paths, f"tree file {path}")
