"""`lanternpp models`: the models, methods and trees that have names, and what each method draws with on a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from lanternpp.api.options import AUTO, DIALS, METHODS, DraftDials, RuleDials, names
from lanternpp.cli import old_options as opt
from lanternpp.cli.overrides import method_for
from lanternpp.cli.tables import show_table
from lanternpp.errors import InputError


def models(
    as_json: opt.Json = False,
    model: opt.Model = opt.MODEL,
    drafter: opt.Drafter = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
) -> None:
    """List the models, methods and trees that have names, and what each method draws with on --model.

    Nothing is downloaded: --model and --drafter must be on this machine.
    """
    from lanternpp.api.model import MODELS
    from lanternpp.models.published import PUBLISHED
    from lanternpp.models.vq.neighbours import cache_folder

    model = here(model)
    drafter = None if drafter is None else here(drafter)
    rows = [describe(name, about) for name, about in MODELS.items()]
    chosen, _ = method_for(model, drafter, AUTO)
    ways = [describe_method(name, model, drafter, device, dtype) for name in METHODS]
    cache = cache_folder(Path(__file__))
    listing: dict[str, Any] = {"models": rows, "published": [asdict(each) for each in PUBLISHED]}
    listing |= {"model": model, "auto": {"method": chosen.method, "why": chosen.why}, "methods": ways}
    listing |= {"trees": trees(), "cache": {"folder": str(cache), "bytes": size(cache)}}
    if as_json:
        typer.echo(json.dumps(listing))
    else:
        show(listing)


def here(named: str) -> str:
    """The name or path of a model or drafter on this machine. Raises InputError where it would have to be fetched."""
    from lanternpp.api.model import MODELS
    from lanternpp.models.hub import UnreachableError, cached, hub_id

    if named in MODELS or Path(named).exists() or (repo := hub_id(named)) is None:
        return named
    try:
        return str(cached(repo, UnreachableError("")))
    except InputError:
        raise InputError(f"{named} is not on this machine; `lanternpp generate` fetches it") from None


def describe(name: str, about: str) -> dict[str, Any]:
    """A row: the folder of the model and its bytes; None and 0 where it is not on this machine."""
    from lanternpp.api.model import model_folder

    try:
        folder = model_folder(name)
    except InputError:
        return {"name": name, "about": about, "folder": None, "bytes": 0}
    return {"name": name, "about": about, "folder": str(folder), "bytes": size(folder)}


def describe_method(
    name: str, model: str, drafter: str | None = None, device: str = "auto", dtype: str = "auto"
) -> dict[str, Any]:
    """A row: what a method draws with on a model, one picture at a time, which network the model lacks for it, and
    whether it fits what the model draws, codes or latents.
    """
    from lanternpp.accept import RULES
    from lanternpp.api.model import holds, latent_family, model_folder, placed
    from lanternpp.api.settings import network_needed, resolve, suits_latents
    from lanternpp.api.tuned import CONDITIONS, Tuned, with_tuned
    from lanternpp.util.registry import find

    folder, other = model_folder(model), model_folder(drafter) if drafter else None
    chosen, defaults = method_for(model, drafter, name)
    settings = resolve(chosen.method, defaults, {})
    on, dtype_found, int8 = placed(device, dtype, folder)
    kind = str(dtype_found).removeprefix("torch.")
    where = {"device": on.type, "dtype": f"int8, {kind}" if int8 else kind}
    where |= {key: getattr(settings, key) for key in CONDITIONS if key not in where}
    if found := Tuned.read(folder, other).settings(name, where):
        settings = resolve(name, with_tuned(defaults, name, found), {})
    network = network_needed(settings)
    available = network is None or other is not None or holds(folder, network)
    fits = suits_latents(settings) or latent_family(folder) is None
    dials = {
        dial: value for dial in names(DraftDials, RuleDials) if (value := getattr(settings, dial)) is not None
    }
    lossless = find("acceptance rule", settings.accept, RULES).lossless
    parts = {"proposer": settings.proposer, "tree": settings.tree, "accept": settings.accept}
    more = {
        "lossless": lossless,
        "dials": dials,
        "tuned": bool(found),
        "missing": None if available else network,
        "fits": fits,
    }
    return {"name": name, **parts, **more, "about": METHODS[name].about}


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
    """Bytes as text."""
    return f"{count / 1e6:.1f} MB"


def show(listing: Mapping[str, Any]) -> None:
    """Print everything on stdout; no name is cut on a narrow terminal."""
    rows = [
        (row["name"], megabytes(row["bytes"]) if row["folder"] else "no", row["about"])
        for row in listing["models"]
    ]
    show_table(("model", "on this machine", "what it is"), rows, prose=True)
    typer.echo("--model also takes a folder, a checkpoint, or a hub id, which is fetched once.")
    typer.echo("Published models, sizes by their numbers of parameters (more: docs/models.md):\n")
    for each in listing["published"]:
        typer.echo(f"{each['name']}: {each['download']}")
        typer.echo(f"  --model {each['model']}")
        drafter = f"--drafter {each['drafter']}" if each["drafter"] else "no drafter is published"
        typer.echo(f"  {drafter}")
        if each["needs"]:
            typer.echo(f"  needs {each['needs']}")
    typer.echo(
        f"\nOn {listing['model']}, one picture at a time; auto takes {listing['auto']['method']} ({listing['auto']['why']}):\n"
    )
    show_table(
        ("method", "lossless", "drafts with", "tree", "rule", "what it is"),
        [method_row(row) for row in listing["methods"] if row["fits"]],
        left=range(6),
        prose=True,
        spare=True,
    )
    if any(row["missing"] and row["fits"] for row in listing["methods"]):
        typer.echo(f"* {listing['model']} has no such network: give one with --drafter\n")
    shapes = [
        (
            row["name"],
            str(row["nodes"]),
            str(row["depth"]),
            "static" if row["static"] else "follows the drafter",
        )
        for row in listing["trees"]
    ]
    show_table(("tree", "nodes", "levels", "shape"), shapes, left=(0, 3))
    typer.echo(
        f"Neighbour tables are cached in {listing['cache']['folder']}: {megabytes(listing['cache']['bytes'])}."
    )


def method_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a method. A star marks a proposer whose network is missing; after the rule come its dials."""
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
