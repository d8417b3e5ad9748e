"""`lanternpp models`: what `--model` and `--method` may name, and what of it is on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from lanternpp.cli import options as opt
from lanternpp.errors import InputError


def models(as_json: opt.Json = False) -> None:
    """List the models that --model can name, what is cached, and the methods that --method can name."""
    from lanternpp.methods import METHODS
    from lanternpp.models import MODELS
    from lanternpp.vq.neighbours import cache_folder

    rows = [describe(name, about) for name, about in MODELS.items()]
    cache = cache_folder(Path(__file__))
    cached = {"folder": str(cache), "bytes": size(cache)}
    ways = [describe_method(name) for name in METHODS]
    if as_json:
        typer.echo(json.dumps({"models": rows, "methods": ways, "cache": cached}))
        return
    show(rows)
    show_methods(ways)
    typer.echo("--model also takes the path of a model folder.")
    typer.echo(f"Neighbour tables are cached in {cache}: {megabytes(size(cache))}.")


def describe(name: str, about: str) -> dict[str, Any]:
    """A row: where the model lies on this machine and how large it is, or None where it does not."""
    from lanternpp.models import model_folder

    try:
        folder = model_folder(name)
    except InputError:
        return {"name": name, "about": about, "folder": None, "bytes": 0}
    return {"name": name, "about": about, "folder": str(folder), "bytes": size(folder)}


def describe_method(name: str) -> dict[str, Any]:
    """A row: a method's parts, and whether its rule leaves the target's law as it is."""
    from lanternpp.accept import RULES
    from lanternpp.methods import method
    from lanternpp.registry import find

    row = method(name)
    lossless = find("acceptance rule", row.accept, RULES).lossless
    parts = {"proposer": row.proposer, "tree": row.tree, "accept": row.accept}
    return {"name": name, **parts, "lossless": lossless, "about": row.about}


def size(folder: Path) -> int:
    """Bytes of all files under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def megabytes(count: int) -> str:
    """Bytes for a reader."""
    return f"{count / 1e6:.1f} MB"


def show(rows: list[dict[str, Any]]) -> None:
    """The rows as a table on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for heading in ("model", "on this machine", "what it is"):
        table.add_column(heading)
    for row in rows:
        table.add_row(row["name"], megabytes(row["bytes"]) if row["folder"] else "no", row["about"])
    Console().print(table)


def show_methods(rows: list[dict[str, Any]]) -> None:
    """The methods as a table on stdout."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("method", "proposer", "tree", "rule", "lossless"):
        table.add_column(heading, no_wrap=True)
    table.add_column("what it is")
    for row in rows:
        lossless = "yes" if row["lossless"] else "no"
        parts = (row["proposer"], row["tree"] or "", row["accept"])
        table.add_row(row["name"], *parts, lossless, row["about"].partition(" (arXiv")[0])
    Console().print(table)
