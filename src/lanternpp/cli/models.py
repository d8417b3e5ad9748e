"""`lanternpp models`: what has a name, and what can be done with a model's files: download, convert, compile its steps."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App

from lanternpp.api.options import (
    AUTO,
    BASELINE,
    DIALS,
    METHODS,
    DraftDials,
    DrawOptions,
    EngineDials,
    PictureDials,
    RuleDials,
    SamplingDials,
    Settings,
    names,
)
from lanternpp.cli import convert as conversion
from lanternpp.cli import options as opt
from lanternpp.cli.tables import show_table
from lanternpp.cli.terminal import say
from lanternpp.errors import InputError
from lanternpp.util import files
from lanternpp.util.options import Option

MOST = 1024  # pictures at once

models = App(
    name="models",
    help="List models, methods and trees; download, convert or warm a model.",
    group_parameters=opt.heading("Options"),
)


@models.command(name="list")
@models.default
@opt.verb
def list_models(
    *,
    as_json: opt.Json = False,
    options: Annotated[DrawOptions, opt.Without(("size", "method", *names(PictureDials)))] = DrawOptions(),
) -> None:
    """List the models, methods and trees that have names, and what each method draws with on --model.

    Nothing is downloaded: --model and --drafter must be on this machine.
    """
    device, dtype = options.device, options.dtype
    from lanternpp.api.model import MODELS
    from lanternpp.models.published import PUBLISHED
    from lanternpp.models.vq.neighbours import cache_folder

    model = here(options.model)
    drafter = None if options.drafter is None else here(options.drafter)
    rows = [describe(name, about) for name, about in MODELS.items()]
    chosen, _ = opt.method_for(model, drafter, AUTO)
    ways = [describe_method(name, model, drafter, device, dtype) for name in METHODS]
    cache = cache_folder(Path(__file__))
    listing: dict[str, Any] = {"models": rows, "published": [asdict(each) for each in PUBLISHED]}
    listing |= {"model": model, "auto": {"method": chosen.method, "why": chosen.why}, "methods": ways}
    listing |= {"trees": trees(), "cache": {"folder": str(cache), "bytes": files.size(cache)}}
    if as_json:
        print(json.dumps(listing))
    else:
        show(listing)


@models.command
@opt.verb
def download(
    model: Annotated[str, Option("A name, or an id of the hub: OWNER/NAME or OWNER/NAME/FILE.")], /
) -> None:
    """Fetch MODEL, so that it can be drawn with later, also where the hub cannot be reached."""
    from lanternpp.api.model import model_folder

    print(model_folder(model))


@models.command(name="convert")
@opt.verb
def convert_model(
    model: Annotated[str, Option("A model folder, a published checkpoint, or a hub id.")],
    out: Annotated[Path, Option("The folder to write; made where it is missing.")],
    /,
    *,
    options: conversion.ConvertOptions = conversion.ConvertOptions(),
) -> None:
    """Write MODEL as the folder OUT, which is quick to read and leaves out what only training needs.

    OUT appears only when all of it is written.
    """
    print(conversion.convert(model, out, options))


@models.command
@opt.verb
def warm(
    *,
    batch_sizes: Annotated[str, Option("Pictures at once, separated by commas.", metavar="A,B,...")] = "1",
    as_json: opt.Json = False,
    options: Annotated[DrawOptions, opt.Without(("batch_size",))] = DrawOptions(),
) -> None:
    """Compile the steps of the method and of plain decoding by torch.compile, and keep them in the cache.

    On a GPU they are drawn compiled from then on; without it they are drawn as they are, at once. On a CPU, whose kernels are
    compiled already, this is done with --compile alone.
    """
    sizes = read_sizes(batch_sizes)
    opt.check(options)

    from lanternpp.engine.compiled import compiled_folder

    began = time.perf_counter()
    pipe = opt.read(options)
    done: list[dict[str, object]] = []
    settings = pipe.settings(options.method, **{"compile": pipe.device.type == "cuda", **options.overrides})
    plain = pipe.settings(
        BASELINE, **{name: getattr(settings, name) for name in names(EngineDials, SamplingDials)}
    )
    for size in sizes if settings.compile else ():
        for each in dict.fromkeys((plain, settings)):
            if pipe.warm(replace(each, batch_size=size)):
                say("warm", f"{each.method} is not compiled whole, so it is drawn as it is")
            else:
                made = f"steps of {each.method}, {size} at a time"
                done.append({"made": made, "kept": str(compiled_folder())})
    if as_json:
        print(json.dumps({"done": done, "seconds": time.perf_counter() - began}))
        return
    for one in done:
        print(f"{one['made']}: in {one['kept']}")
    print(
        f"ready after {time.perf_counter() - began:.1f} s"
        if done
        else "nothing to compile here: a CPU compiles steps with --compile alone"
    )


def read_sizes(text: str) -> list[int]:
    """Batch sizes, ascending. Raises InputError."""
    try:
        sizes = sorted({int(word) for word in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or not 1 <= sizes[0] <= sizes[-1] <= MOST:
        raise InputError(
            f"--batch-sizes {text!r} is no list of sizes; use whole numbers from 1 to {MOST} parted by commas"
        )
    return sizes


def here(named: str) -> str:
    """The name or path of a model or drafter on this machine. Raises InputError where it would have to be fetched."""
    from lanternpp.api.model import MODELS
    from lanternpp.models.hub import UnreachableError, cached, hub_id

    if named in MODELS or Path(named).exists() or (repo := hub_id(named)) is None:
        return named
    try:
        return str(cached(repo, UnreachableError("")))
    except InputError:
        raise InputError(f"{named} is not on this machine; `lanternpp models download` fetches it") from None


def describe(name: str, about: str) -> dict[str, Any]:
    """A row: the folder of the model and its bytes; None and 0 where it is not on this machine."""
    from lanternpp.api.model import model_folder

    try:
        folder = model_folder(name)
    except InputError:
        return {"name": name, "about": about, "folder": None, "bytes": 0}
    return {"name": name, "about": about, "folder": str(folder), "bytes": files.size(folder)}


def describe_method(
    name: str, model: str, drafter: str | None = None, device: str = "auto", dtype: str = "auto"
) -> dict[str, Any]:
    """A row: what a method draws with on a model, one picture at a time, which network the model lacks for it, and
    whether it fits what the model draws, codes or latents.
    """
    from lanternpp.accept import RULES
    from lanternpp.api.model import holds, latent_family, model_folder, placed
    from lanternpp.api.settings import network_needed, suits_latents
    from lanternpp.api.tuned import CONDITIONS, Tuned, resolve_tuned
    from lanternpp.util.registry import find

    folder, other = model_folder(model), model_folder(drafter) if drafter else None
    chosen, defaults = opt.method_for(model, drafter, name)
    on, dtype_found, int8 = placed(device, dtype, folder)
    kind = str(dtype_found).removeprefix("torch.")
    where = {"device": on.type, "dtype": f"int8, {kind}" if int8 else kind}

    def conditions(settings: Settings) -> dict[str, Any]:
        return {key: getattr(settings, key) for key in CONDITIONS if key not in where} | where

    tuned = Tuned.read(folder, other)
    settings = resolve_tuned(chosen.method, defaults, {}, False, tuned, conditions)
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
        "tuned": tuned.knows(asdict(settings)),
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


def show(listing: Mapping[str, Any]) -> None:
    """Print everything on stdout; no name is cut on a narrow terminal."""
    rows = [
        (row["name"], files.megabytes(row["bytes"]) if row["folder"] else "no", row["about"])
        for row in listing["models"]
    ]
    show_table(("model", "on this machine", "what it is"), rows, prose=True)
    print("--model also takes a folder, a checkpoint, or a hub id, which is fetched once.")
    print("Published models, sizes by their numbers of parameters (more: docs/models.md):\n")
    for each in listing["published"]:
        print(f"{each['name']}: {each['download']}")
        print(f"  --model {each['model']}")
        drafter = f"--drafter {each['drafter']}" if each["drafter"] else "no drafter is published"
        print(f"  {drafter}")
        if each["needs"]:
            print(f"  needs {each['needs']}")
    print(
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
        print(f"* {listing['model']} has no such network: give one with --drafter\n")
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
    print(
        f"Neighbour tables are cached in {listing['cache']['folder']}: {files.megabytes(listing['cache']['bytes'])}."
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
