"""Tree builders, and the shapes that can be named."""

from __future__ import annotations

import json
from textwrap import shorten
from typing import cast

from lanternpp.errors import InputError
from lanternpp.trees.base import TreeBuilder
from lanternpp.trees.static import SHAPES, Shape, StaticTree
from lanternpp.util.jsonfile import parse_json
from lanternpp.util.registry import check_class, check_instance, find

PATHS = "a tree is a list of paths such as [[0], [0, 0], [1]]"

TREES: dict[str, Shape | str] = {
    **SHAPES,
    "eagle2": "lanternpp.trees.dynamic:DynamicTree",
    "eagle2-58": "lanternpp.trees.dynamic:SMALLER",
    "ddd": "lanternpp.trees.dynamic:DYNAMIC_DEPTH",
}


def build_tree(name: str) -> TreeBuilder:
    """Return the builder of a name: an entry of `TREES`, paths as JSON, or what the caller gave. InputError where there is none."""
    if name.startswith("["):
        source = f"tree {shorten(name, 40, placeholder='...')!r}"
        return StaticTree(parse_json(name, source, PATHS), source)
    entry = find("tree", name, TREES, "a .json file with a list of paths")
    if isinstance(entry, list | tuple):
        return StaticTree(entry, f"tree {str(name)!r}")
    if not isinstance(entry, TreeBuilder):
        check_class("tree", name, entry, TreeBuilder)
        try:
            entry = entry()
        except TypeError as error:
            raise InputError(f"tree {name} cannot be made without arguments: {error}") from None
    check_instance("tree", name, entry, TreeBuilder, "size", "depth", "scratch")
    return cast("TreeBuilder", entry)


def static_shape(name: str) -> Shape | None:
    """Return the shape of the tree of a name; None if it is not static."""
    builder = build_tree(name)
    return builder.shape if isinstance(builder, StaticTree) else None


def shape_name(shape: Shape) -> str:
    """Return the name of a shape for `build_tree`: its paths as JSON without spaces."""
    return json.dumps([list(path) for path in shape], separators=(",", ":"))
