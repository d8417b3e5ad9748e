"""Tree builders, and the shapes that can be named."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import shorten

from lanternpp.errors import InputError
from lanternpp.trees.base import TreeBuilder
from lanternpp.trees.static import SHAPES, Shape, StaticTree
from lanternpp.util.jsonfile import parse_json, read_json
from lanternpp.util.registry import Importable, check_class, check_made, find

PATHS = "a tree is a list of paths such as [[0], [0, 0], [1]]"

TREES: dict[str, Shape | str] = {
    **SHAPES,
    "eagle2": "lanternpp.trees.dynamic:DynamicTree",
    "eagle2-58": "lanternpp.trees.dynamic:SMALLER",
    "ddd": "lanternpp.trees.dynamic:DepthTree",
}


def build_tree(name: str) -> TreeBuilder:
    """A builder by name: an entry of `TREES`, or paths as JSON.

    An `Importable` may also be the name of a file of paths, or "package.module:Name" of a class, of a builder or of a
    list of paths. Raises InputError.
    """
    if name.startswith("["):
        named = f"tree {shorten(name, 40, placeholder='...')!r}"
        return StaticTree(parse_json(name, named, PATHS), named)
    if isinstance(name, Importable) and name.endswith(".json"):
        return StaticTree(read_json(Path(name), PATHS), f"tree file {Path(name)}")
    entry = find("tree", name, TREES, "a .json file with a list of paths")
    if isinstance(entry, list | tuple):
        return StaticTree(entry, f"tree {str(name)!r}")
    if not isinstance(entry, TreeBuilder):
        check_class("tree", name, entry, TreeBuilder)
        try:
            entry = entry()
        except TypeError as error:
            raise InputError(f"tree {name} cannot be made without arguments: {error}") from None
    check_made("tree", name, entry, TreeBuilder, "size", "depth", "scratch")
    made: TreeBuilder = entry
    return made


def static_shape(name: str) -> Shape | None:
    """The shape of a static tree by name; None of another."""
    built = build_tree(name)
    return built.shape if isinstance(built, StaticTree) else None


def shape_name(shape: Shape) -> str:
    """A shape as `build_tree` takes it: its paths as JSON without spaces."""
    return json.dumps([list(path) for path in shape], separators=(",", ":"))
