"""`lanternpp models`: what has a name, and what can be done with a model's files: download, convert, compile its steps."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App

from lanternpp.api.options import (
    BASELINE,
    DIALS,
    METHODS,
    DraftDials,
    DrawOptions,
    EngineDials,
    PictureDials,
    RuleDials,
    SamplingDials,
    draft_of,
    names,
)
from lanternpp.cli import VERBS
from lanternpp.cli import options as opt
from lanternpp.errors import InputError
from lanternpp.training.options import Stored
from lanternpp.util import files
from lanternpp.util.jsonfile import read_object, write_json
from lanternpp.util.options import Option
from lanternpp.util.terminal import say, show_table

if TYPE_CHECKING:
    from lanternpp.api.defaults import Defaults

PARTS = ("tokenizer", "target", "drafter", "parallel")
REST = ("independent", "classifier", "text")  # other parts that a model may have
FILES = ("defaults.json", "embeddings.safetensors", "prompts.txt", "synonyms.txt", "acceptance.json")
README = "README.md"
PROVENANCE = "provenance.json"
models = App(name="models", help=VERBS["models"], group_parameters=opt.heading("Options"))


@models.command(name="list")
@models.default
@opt.verb
def list_models(
    *,
    as_json: opt.Json = False,
    options: Annotated[DrawOptions, opt.without("size", "method", *names(PictureDials))] = DrawOptions(),
) -> None:
    """List the models, methods and trees that have names; with --model or --drafter, the settings of each method there.

    Nothing is downloaded: --model and --drafter must be on this machine.
    """
    from lanternpp.api.model import ASSETS, MODELS, dtype_name, placed
    from lanternpp.models.hub import PUBLISHED
    from lanternpp.models.vq.codes import cache_folder
    from lanternpp.trees import SHAPES, TREES, build_tree

    model = here(options.model)
    drafter = None if options.drafter is None else here(options.drafter)
    defaults = opt.defaults_of(replace(options, model=model, drafter=drafter))
    on, kind, int8 = placed(options.device, options.dtype, defaults.folder)
    where = {"device": on.type, "dtype": dtype_name(kind, int8)}
    chosen = defaults.chosen()
    why = chosen.reason(defaults.settings(chosen.method, {}, where))
    made = {name: build_tree(name) for name in TREES}
    cache = cache_folder(Path(__file__))
    listing: dict[str, Any] = {
        "models": [
            {"name": name, "about": about, "folder": str(ASSETS / name), "bytes": files.size(ASSETS / name)}
            for name, about in MODELS.items()
        ],
        "published": [asdict(each) for each in PUBLISHED],
        "model": model,
        "auto": {"method": chosen.method, "why": why},
        "methods": [describe_method(name, defaults, where) for name in METHODS],
        "trees": [
            {"name": name, "nodes": tree.size - 1, "depth": tree.depth, "static": name in SHAPES}
            for name, tree in made.items()
        ],
        "cache": {"folder": str(cache), "bytes": files.size(cache)},
    }
    if as_json:
        print(json.dumps(listing))
        return
    if options.model == DrawOptions.model and drafter is None:
        show_names(listing)
    show_methods(listing)


@models.command
@opt.verb
def download(
    model: Annotated[str, Option("A name, or an id of the hub: OWNER/NAME or OWNER/NAME/FILE.")], /
) -> None:
    """Fetch MODEL, so that it can be drawn with later, also where the hub cannot be reached."""
    from lanternpp.api.model import model_folder

    print(model_folder(model))


@models.command
@opt.verb
def warm(
    *,
    batch_sizes: Annotated[str, Option("Pictures at once, separated by commas.", metavar="A,B,...")] = "1",
    as_json: opt.Json = False,
    options: Annotated[DrawOptions, opt.without("batch_size")] = DrawOptions(),
) -> None:
    """Compile the steps of the method and of plain decoding by torch.compile, and keep them in the cache.

    On a GPU they are drawn compiled from then on; without it they are drawn as they are, at once. On a CPU, whose kernels are
    compiled already, this is done with --compile alone.
    """
    sizes = opt.read_sizes(batch_sizes)
    opt.check(options)

    from lanternpp.engine.compiled import compiled_folder

    began = time.perf_counter()
    pipe = opt.read(options)
    done: list[dict[str, object]] = []
    settings = pipe.settings(options.method, **{"compile": pipe.device.type == "cuda", **options.overrides})
    if settings.compile and pipe.target.channels:
        raise InputError(f"{pipe.name} draws latents, whose verification is never compiled: nothing to warm")
    shared = {name: getattr(settings, name) for name in names(EngineDials, SamplingDials)}
    plain = pipe.settings(BASELINE, **shared)
    for size in sizes if settings.compile else ():
        for each in dict.fromkeys((plain, settings)):
            if pipe.warm(replace(each, batch_size=size)):
                say("warm", f"{each.method} is not compiled in one piece, so it is drawn as it is")
            else:
                made = f"steps of {each.method}, {size} at a time"
                done.append({"made": made, "kept": str(compiled_folder())})
    seconds = time.perf_counter() - began
    if as_json:
        print(json.dumps({"done": done, "seconds": seconds}))
        return
    for one in done:
        print(f"{one['made']}: in {one['kept']}")
    nothing = "nothing to compile here: a CPU compiles steps with --compile alone"
    print(f"ready after {seconds:.1f} s" if settings.compile else nothing)


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


def describe_method(name: str, defaults: Defaults, where: Mapping[str, str]) -> dict[str, Any]:
    """A row: a method's settings on a model for one picture at a time, the network that the model lacks for it, and
    whether it fits the model's codes or latents. where: a device type and a dtype.
    """
    from lanternpp.api.model import latent_family
    from lanternpp.api.settings import network_needed, part, suits_latents

    settings = defaults.settings(name, {}, where)
    every, network = asdict(settings), network_needed(settings)
    return {
        "name": name,
        **{key: every[key] for key in ("proposer", "tree", "accept")},
        "lossless": part("accept", settings.accept).lossless,
        "dials": {dial: every[dial] for dial in names(DraftDials, RuleDials) if every[dial] is not None},
        "tuned": defaults.is_tuned(settings),
        "missing": None if defaults.holds(network) else network,
        "fits": suits_latents(settings) or latent_family(defaults.folder) is None,
        "about": METHODS[name].about,
    }


def show_names(listing: Mapping[str, Any]) -> None:
    """Print the models and trees that have names; none is truncated on a narrow terminal."""
    cache = listing["cache"]
    rows = [(row["name"], files.megabytes(row["bytes"]), row["about"]) for row in listing["models"]]
    show_table(("model", "on this machine", "what it is"), rows, prose=True)
    print("--model also takes a folder, a checkpoint, or a hub id, which is fetched once.")
    print("Published models, sizes by their numbers of parameters (more: docs/models.md):\n")
    for each in listing["published"]:
        print(f"{each['name']}: {each['download']}\n  --model {each['model']}")
        print(f"  --drafter {each['drafter']}" if each["drafter"] else "  no drafter is published")
        if each["needs"]:
            print(f"  needs {each['needs']}")
    kinds = {True: "static", False: "follows the drafter"}
    shapes = [
        (row["name"], str(row["nodes"]), str(row["depth"]), kinds[row["static"]]) for row in listing["trees"]
    ]
    print()
    show_table(("tree", "nodes", "levels", "shape"), shapes, left=(0, 3))
    print(f"Neighbour tables are cached in {cache['folder']}: {files.megabytes(cache['bytes'])}.\n")


def show_methods(listing: Mapping[str, Any]) -> None:
    """Print the methods on a model."""
    model, auto = listing["model"], listing["auto"]
    print(f"On {model}, one picture at a time; auto takes {auto['method']} ({auto['why']}):\n")
    methods = [row for row in listing["methods"] if row["fits"]]
    headings = ("method", "lossless", "proposer", "draft", "rule", "what it is")
    show_table(headings, [method_row(row) for row in methods], left=range(6), prose=True, spare=True)
    if any(row["missing"] for row in methods):
        print(f"* {model} has no such network: give one with --drafter")


def method_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a method. A star marks a proposer whose network is missing; after the rule come its dials."""
    tree = row["tree"]
    numbers = [(DIALS[name], value) for name, value in row["dials"].items() if name in names(RuleDials)]
    dials = [f"{dial.short or dial.spoken} {value:g}" for dial, value in numbers if dial.kind is not str]
    return (
        row["name"],
        "yes" if row["lossless"] else "no",
        row["proposer"] + ("*" if row["missing"] else ""),
        tree if tree and not tree.startswith("[") else draft_of(row["dials"]) or "",
        " ".join([row["accept"], *dials]),
        row["about"].partition(" (arXiv")[0],
    )


@models.command
@opt.verb
def convert(
    model: Annotated[str, Option("A model folder, a published checkpoint, or a hub id.")],
    out: Annotated[Path, Option("The folder to write; made where it is missing.")],
    /,
    *,
    store: Stored | None = None,
    vq: Annotated[str | None, Option(metavar="FILE|HUB_ID")] = None,
    text: Annotated[Path | None, Option("The text encoder of a published checkpoint.", metavar="DIR")] = None,
    size: Annotated[str | None, Option(metavar="PIXELS|WxH")] = None,
    overwrite: Annotated[bool, Option("Replace the model that OUT holds.")] = False,
) -> None:
    """Write MODEL as the folder OUT, which is quick to read and leaves out what only training needs.

    OUT appears only when all of it is written.

    store: float32, bfloat16, int8 or int6: 8 or 6 bits a weight and a scale per output channel. Default: bfloat16 of a published
        checkpoint, int8 of a folder that lanternpp wrote.
    vq: The image tokenizer of a published checkpoint, OWNER/NAME/FILE on the hub.
    size: The size of its pictures, where no file says.
    """
    if text is not None and not text.exists():
        raise InputError(f"--text {str(text)!r} does not exist; give a folder")
    inside = Path(model).exists() and Path(model).resolve().is_relative_to(out.resolve())
    if out.exists() and (not out.is_dir() or inside):
        raise InputError(f"output {str(out)!r} is a file, or contains MODEL; name a new folder")
    there = [name for name in (*PARTS, *REST, *FILES, README, "config.json") if (out / name).exists()]
    if there and not overwrite:
        raise InputError(
            f"output {str(out)!r} holds a model, or files of one ({', '.join(there)}); name a new folder, or replace "
            "these with --overwrite"
        )
    opt.writable_folder(out.resolve())

    from lanternpp.api.model import model_folder
    from lanternpp.models.hub import hub_id
    from lanternpp.nn.checkpoints import load_config

    if vq and not Path(vq).exists() and not hub_id(vq):
        raise InputError(f"--vq {vq!r} does not exist; give a file, or OWNER/NAME/FILE of the hub")
    source = model_folder(model)
    given = {"tokenizer": model_folder(vq) if vq else None, "text": text, "size": size}
    ours = (source / "target").is_dir() and "kind" in load_config(source / "target")
    if ours and any(given.values()):
        raise InputError(f"--vq, --text and --size are for published checkpoints; {model!r} is none")
    store = store or ("int8" if ours else "bfloat16")
    called = source.resolve().name if Path(model).exists() else model
    with staged(out) as stage:
        parts = [] if ours else adopt(source, stage, store, given, called)
        # a folder called tokenizer or text beside a published model is another program's
        theirs = () if (source / "target").is_dir() else ("tokenizer", "text")
        parts += rewrite(source, stage, store, (*parts, *theirs))
    print(f"{out}: {', '.join(parts)}; {files.megabytes(files.size(out))} in {store}")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """An empty folder whose contents become those of OUT when the block ends; an older model in OUT is removed."""
    out = out.resolve()  # "." has no name, and a link may lead to nothing
    place = next(path for path in (out, *out.parents) if path.exists())
    with TemporaryDirectory(prefix=f".{out.name}.", dir=place, ignore_cleanup_errors=True) as temporary:
        stage = Path(temporary) / out.name
        stage.mkdir()
        yield stage
        if not out.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            stage.replace(out)
            return
        older = {*PARTS, *REST, *FILES} if any((out / part).is_dir() for part in PARTS) else set()
        for name in older | {path.name for path in stage.iterdir()}:
            if (out / name).is_dir() and not (out / name).is_symlink():
                shutil.rmtree(out / name)
            else:
                (out / name).unlink(missing_ok=True)
        for path in stage.iterdir():
            path.replace(out / path.name)


def rewrite(source: Path, out: Path, store: Any, written: Sequence[str] = ()) -> list[str]:
    """Write the parts of a folder that lanternpp wrote, except those written already; returns the names of the parts."""
    from lanternpp.api.rates import FILE as RATES
    from lanternpp.evaluation.classifier import CLASSIFIER, REFERENCE, has_classifier
    from lanternpp.nn import checkpoints

    there = [
        part for part in (*PARTS, "independent", "text") if part not in written and (source / part).is_dir()
    ]
    parts = [part for part in PARTS if part in there and "kind" in checkpoints.load_config(source / part)]
    for part in parts:
        config, tensors = checkpoints.load(source / part)
        keep = [name for name in tensors if name.endswith("codebook")]
        checkpoints.save(out / part, config, tensors, store, keep)
        if (source / part / PROVENANCE).is_file():
            write_json(out / part / PROVENANCE, read_object(source / part / PROVENANCE) | {"store": store})
    kept = [*FILES, README, *(f"{part}/{RATES}" for part in parts)]
    if has_classifier(source):  # unchanged: its reference was computed with exactly these weights
        of_classifier = (checkpoints.CONFIG, checkpoints.WEIGHTS, REFERENCE, PROVENANCE)
        kept += [f"{CLASSIFIER}/{name}" for name in of_classifier]
        parts.append(CLASSIFIER)
    for name in kept:
        if (source / name).is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, out / name)
    for part in there:
        if part not in parts:  # others' drafters stay in their layout
            shutil.copytree(source / part, out / part, ignore=shutil.ignore_patterns("state.pt"))
            parts.append(part)
    return parts


def adopt(source: Path, out: Path, store: Any, given: dict[str, Any], called: str) -> list[str]:
    """Write a published checkpoint with its tokenizer, and its text encoder if that is on this machine; returns the parts."""
    from lanternpp.api.model import DEFAULTS, read_target
    from lanternpp.util.devices import DTYPES

    target = read_target(source, DTYPES["bfloat16" if store == "bfloat16" else "float32"], given=given)
    parts = target.save(out, store)
    before = source / "target" / PROVENANCE
    known = read_object(before) if before.is_file() else {"converted from": called}
    write_json(out / "target" / PROVENANCE, known | {"store": store})
    write_json(out / DEFAULTS, target.defaults)
    return parts
