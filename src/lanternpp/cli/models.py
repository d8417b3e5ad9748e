"""`lanternpp models`: what `--model`, `--method` and `--tree` may name, what of it is here, and what it would draw with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from lanternpp.cli import options as opt
from lanternpp.cli.overrides import method_for
from lanternpp.cli.tables import show_table
from lanternpp.dials import DIALS, DRAFT, RULE, names
from lanternpp.errors import InputError
from lanternpp.methods import AUTO


def models(
    as_json: opt.Json = False,
    model: opt.Model = opt.MODEL,
    drafter: opt.Drafter = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
) -> None:
    """List the models, methods and trees that can be named; of each method, what it would draw with on --model.

    Nothing is fetched: --model and --drafter must be on this machine.
    """
    from lanternpp.methods import METHODS
    from lanternpp.models import MODELS
    from lanternpp.published import PUBLISHED
    from lanternpp.vq.neighbours import cache_folder

    model = here(model)
    drafter = None if drafter is None else here(drafter)
    rows = [describe(name, about) for name, about in MODELS.items()]
    chosen, _ = method_for(model, drafter, AUTO, device)
    ways = [describe_method(name, model, drafter, device, dtype) for name in METHODS]
    cache = cache_folder(Path(__file__))
    told: dict[str, Any] = {"models": rows, "published": [asdict(each) for each in PUBLISHED]}
    told |= {"model": model, "auto": {"method": chosen.method, "why": chosen.why}, "methods": ways}
    told |= {"trees": trees(), "cache": {"folder": str(cache), "bytes": size(cache)}}
    if as_json:
        typer.echo(json.dumps(told))
    else:
        show(told)


def here(named: str) -> str:
    """A model or drafter that is on this machine, as it can be named. Raises InputError."""
    from lanternpp.hub import UnreachableError, cached, hub_id
    from lanternpp.models import MODELS

    if named in MODELS or Path(named).exists() or (wanted := hub_id(named)) is None:
        return named
    try:
        return str(cached(wanted, UnreachableError("")))
    except InputError:
        raise InputError(f"{named} is not on this machine; `lanternpp generate` fetches it") from None


def describe(name: str, about: str) -> dict[str, Any]:
    """A row: where the model lies on this machine and how large it is, or None where it does not."""
    from lanternpp.models import model_folder

    try:
        folder = model_folder(name)
    except InputError:
        return {"name": name, "about": about, "folder": None, "bytes": 0}
    return {"name": name, "about": about, "folder": str(folder), "bytes": size(folder)}


def describe_method(
    name: str, model: str, drafter: str | None = None, device: str = "auto", dtype: str = "auto"
) -> dict[str, Any]:
    """A row: what a method draws with on a model one picture at a time, and what of that is missing."""
    from lanternpp.accept import RULES
    from lanternpp.devices import pick_device, pick_dtype
    from lanternpp.methods import method
    from lanternpp.models import holds, model_folder
    from lanternpp.registry import find
    from lanternpp.settings import network_needed, resolve
    from lanternpp.tuned import CONDITIONS, Tuned

    folder, other = model_folder(model), model_folder(drafter) if drafter else None
    chosen, defaults = method_for(model, drafter, name)
    settings = resolve(chosen.method, defaults, {})
    on = pick_device(device)
    kind = str(pick_dtype(dtype, on)).removeprefix("torch.")
    where = {"device": on.type, "dtype": kind if dtype != "int8" else f"int8, {kind}"}
    where |= {key: getattr(settings, key) for key in CONDITIONS if key not in where}
    if found := Tuned.read(folder, other).settings(name, where):
        rows = defaults.get("methods", {})
        own = {**rows, name: {**rows.get(name, {}), **found}}
        settings = resolve(name, {**defaults, "methods": own}, {})
    wanted = network_needed(settings)
    there = wanted is None or other is not None or holds(folder, wanted)
    dials = {dial: value for dial in names(DRAFT, RULE) if (value := getattr(settings, dial)) is not None}
    lossless = find("acceptance rule", settings.accept, RULES).lossless
    parts = {"proposer": settings.proposer, "tree": settings.tree, "accept": settings.accept}
    more = {"lossless": lossless, "dials": dials, "tuned": bool(found), "missing": None if there else wanted}
    return {"name": name, **parts, **more, "about": method(name).about}


def trees() -> list[dict[str, Any]]:
    """Every tree that --tree can name, with its nodes below the root and its levels."""
    from lanternpp.trees import SHAPES, TREES, build_tree

    made = {name: build_tree(name) for name in TREES}
    return [
        {"name": name, "nodes": tree.size - 1, "depth": tree.depth, "static": name in SHAPES}
        for name, tree in made.items()
    ]


def size(folder: Path) -> int:
    """Bytes of all files under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def megabytes(count: int) -> str:
    """Bytes for a reader."""
    return f"{count / 1e6:.1f} MB"


def show(told: Mapping[str, Any]) -> None:
    """Everything on stdout; no name is cut, however narrow the terminal."""
    rows = [
        (row["name"], megabytes(row["bytes"]) if row["folder"] else "no", row["about"])
        for row in told["models"]
    ]
    show_table(("model", "on this machine", "what it is"), rows, prose=True)
    typer.echo("--model also takes a folder, a checkpoint, or a hub id, which is fetched once.")
    typer.echo("Published models, sizes by their numbers of parameters (more: docs/models.md):\n")
    for each in told["published"]:
        typer.echo(f"{each['name']}: {each['download']}")
        typer.echo(f"  --model {each['model']}")
        drafter = f"--drafter {each['drafter']}" if each["drafter"] else "no drafter is published"
        typer.echo(f"  {drafter}")
        if each["needs"]:
            typer.echo(f"  needs {each['needs']}")
    typer.echo(
        f"\nOn {told['model']}, one picture at a time; auto takes {told['auto']['method']} ({told['auto']['why']}):\n"
    )
    show_table(
        ("method", "lossless", "drafts with", "tree", "rule", "what it is"),
        [method_row(row) for row in told["methods"]],
        left=range(6),
        prose=True,
        spare=True,
    )
    if any(row["missing"] for row in told["methods"]):
        typer.echo(f"* {told['model']} has no such network: give one with --drafter\n")
    shapes = [
        (
            row["name"],
            str(row["nodes"]),
            str(row["depth"]),
            "static" if row["static"] else "follows the drafter",
        )
        for row in told["trees"]
    ]
    show_table(("tree", "nodes", "levels", "shape"), shapes, left=(0, 3))
    typer.echo(
        f"Neighbour tables are cached in {told['cache']['folder']}: {megabytes(told['cache']['bytes'])}."
    )


def method_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A method's cells: a proposer whose network is missing has a star, a rule its dials."""
    numbers = [(DIALS[name], value) for name, value in row["dials"].items() if not isinstance(value, str)]
    dials = {dial.short or dial.spoken: f"{value:g}" for dial, value in numbers}
    window = dials.pop("window", None)
    tree = row["tree"] or ("" if window is None else f"window {window}")
    return (
        row["name"],
        "yes" if row["lossless"] else "no",
        row["proposer"] + ("*" if row["missing"] else ""),
        tree if not tree.startswith("[") else f"{tree.count('[') - 1} nodes",
        " ".join([row["accept"], *(f"{name} {value}" for name, value in dials.items())]),
        row["about"].partition(" (arXiv")[0],
    )
