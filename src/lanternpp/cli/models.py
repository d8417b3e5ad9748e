"""`lanternpp models`: the list of models, methods and trees, and the download, conversion and compilation of a model."""

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
from lanternpp.util.jsonfile import read_json, read_object, write_json
from lanternpp.util.options import Option
from lanternpp.util.terminal import say, show_table

if TYPE_CHECKING:
    from lanternpp.api.defaults import Defaults

PARTS = ("tokenizer", "target", "drafter", "parallel")
OPTIONAL_PARTS = ("independent", "classifier", "text")
FILES = ("defaults.json", "embeddings.safetensors", "prompts.txt", "synonyms.txt", "acceptance.json")
README = "README.md"
PROVENANCE = "provenance.json"
ONLY_TRAINING = ("state.pt", "log.jsonl", "samples")  # files of a part that drawing does not need
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
    from lanternpp.api.model import ASSETS, MODELS, dtype_name, pick_placement
    from lanternpp.trees import SHAPES, TREES, build_tree

    model = local_name(options.model)
    drafter = None if options.drafter is None else local_name(options.drafter)
    defaults = opt.defaults_of(replace(options, model=model, drafter=drafter))
    device, dtype, stored = pick_placement(options.device, options.dtype, defaults.folder)
    machine = {"device": device.type, "dtype": dtype_name(dtype, stored)}
    chosen = defaults.chosen()
    reason = chosen.reason(defaults.settings(chosen.method, {}, machine))
    trees = {name: build_tree(name) for name in TREES}
    cache = files.user_cache()
    listing: dict[str, Any] = {
        "models": [
            {"name": name, "about": about, "folder": str(ASSETS / name), "bytes": files.size(ASSETS / name)}
            for name, about in MODELS.items()
        ],
        "published": read_json(ASSETS / "published.json"),
        "model": model,
        "auto": {"method": chosen.method, "why": reason},
        "methods": [describe_method(name, defaults, machine) for name in METHODS],
        "trees": [
            {"name": name, "nodes": tree.size - 1, "depth": tree.depth, "static": name in SHAPES}
            for name, tree in trees.items()
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

    start = time.perf_counter()
    pipe = opt.read(options)
    compiled: list[dict[str, object]] = []
    settings = pipe.settings(options.method, **{"compile": pipe.device.type == "cuda", **options.overrides})
    shared = {name: getattr(settings, name) for name in names(EngineDials, SamplingDials)}
    plain = pipe.settings(BASELINE, **shared)
    for size in sizes if settings.compile else ():
        for side in dict.fromkeys((plain, settings)):
            if pipe.warm(replace(side, batch_size=size)):
                say("warm", f"{side.method} is not compiled in one piece, so it is drawn as it is")
            else:
                steps = f"steps of {side.method}, {size} at a time"
                compiled.append({"made": steps, "kept": str(compiled_folder())})
    seconds = time.perf_counter() - start
    if as_json:
        print(json.dumps({"done": compiled, "seconds": seconds}))
        return
    for row in compiled:
        print(f"{row['made']}: in {row['kept']}")
    hint = "nothing to compile here: a CPU compiles steps with --compile alone"
    print(f"ready after {seconds:.1f} s" if settings.compile else hint)


def local_name(name: str) -> str:
    """Return the name or path of a model or drafter on this machine; raise InputError if it would have to be fetched."""
    from lanternpp.api.model import MODELS
    from lanternpp.models.hub import cached, hub_id

    repository = hub_id(name)
    if name in MODELS or Path(name).exists() or repository is None:
        return name
    if path := cached(repository):
        return str(path)
    raise InputError(f"{name} is not on this machine; `lanternpp models download` fetches it")


def describe_method(name: str, defaults: Defaults, machine: Mapping[str, str]) -> dict[str, Any]:
    """Return a method's row: its settings on a model for one picture at a time, the network that the model lacks for the method, and
    whether the method fits the model's codes or latents. machine: a device type and a dtype.
    """
    from lanternpp.api.model import latent_family
    from lanternpp.api.settings import network_needed, part, suits_latents

    settings = defaults.settings(name, {}, machine)
    values, network = asdict(settings), network_needed(settings)
    return {
        "name": name,
        **{key: values[key] for key in ("proposer", "tree", "accept")},
        "lossless": part("accept", settings.accept).lossless,
        "dials": {dial: values[dial] for dial in names(DraftDials, RuleDials) if values[dial] is not None},
        "tuned": defaults.is_tuned(settings),
        "missing": None if defaults.holds(network) else network,
        "fits": suits_latents(settings) or latent_family(defaults.folder) is None,
        "about": METHODS[name].about,
    }


def show_names(listing: Mapping[str, Any]) -> None:
    """Print the models and trees that have names; no name is truncated on a narrow terminal."""
    cache = listing["cache"]
    rows = [(row["name"], files.megabytes(row["bytes"]), row["about"]) for row in listing["models"]]
    show_table(("model", "on this machine", "what it is"), rows, prose=True)
    print("--model also takes a folder, a checkpoint, or a hub id, which is fetched once.")
    print("Published models, sizes by their numbers of parameters (more: docs/models.md):\n")
    for row in listing["published"]:
        print(f"{row['name']}: {row['download']}\n  --model {row['model']}")
        print(f"  --drafter {row['drafter']}" if row["drafter"] else "  no drafter is published")
        if row["needs"]:
            print(f"  needs {row['needs']}")
    shapes = {True: "static", False: "follows the drafter"}
    trees = [
        (row["name"], str(row["nodes"]), str(row["depth"]), shapes[row["static"]]) for row in listing["trees"]
    ]
    print()
    show_table(("tree", "nodes", "levels", "shape"), trees, left=(0, 3))
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
    """Return the cells of a method. A star marks a proposer whose network is missing; the rule is followed by its dials."""
    tree = row["tree"]
    values = [(DIALS[name], value) for name, value in row["dials"].items() if name in names(RuleDials)]
    dials = [f"{dial.short or dial.spoken} {value:g}" for dial, value in values if dial.kind is not str]
    return (
        row["name"],
        "yes" if row["lossless"] else "no",
        f"{row['proposer']}*" if row["missing"] else row["proposer"],
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
    model_files = (*PARTS, *OPTIONAL_PARTS, *FILES, README, "config.json")
    existing = [name for name in model_files if (out / name).exists()]
    if existing and not overwrite:
        raise InputError(
            f"output {str(out)!r} holds a model, or files of one ({', '.join(existing)}); name a new folder, or replace "
            "these with --overwrite"
        )
    opt.writable_folder(out.resolve())

    from lanternpp.api.model import DEFAULTS, model_folder, read_target, target_source
    from lanternpp.nn.checkpoints import load_config
    from lanternpp.util.devices import DTYPES

    source = model_folder(model)
    is_published = not (source / "target").is_dir() or "kind" not in load_config(source / "target")
    if any((vq, text, size)) and not is_published:
        raise InputError(f"--vq, --text and --size are for published checkpoints; {model!r} is none")
    store = store or ("bfloat16" if is_published else "int8")
    if is_published:  # before the tokenizer is fetched
        target_source(source)[1].check_store(store)
    inputs = {"vq": model_folder(vq, "image tokenizer") if vq else None, "text": text, "size": size}
    name = source.resolve().name if Path(model).exists() else model
    with staged(out) as stage:
        parts: list[str] = []
        if is_published:
            dtype = DTYPES["bfloat16" if store == "bfloat16" else "float32"]
            target = read_target(source, dtype, given=inputs)
            parts = target.save(stage, store)
            copy_provenance(source / "target", stage / "target", store, **{"converted from": name})
            write_json(stage / DEFAULTS, target.defaults)
        # A folder tokenizer or text beside a published model belongs to another program.
        foreign = () if (source / "target").is_dir() else ("tokenizer", "text")
        parts += convert_parts(source, stage, store, (*parts, *foreign))
    print(f"{out}: {', '.join(parts)}; {files.megabytes(files.size(out))} in {store}")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield an empty folder whose contents become those of OUT when the block ends; an older model in OUT is removed."""
    out = out.resolve()  # "." has no name, and a link may lead to nothing
    existing = next(path for path in (out, *out.parents) if path.exists())
    with TemporaryDirectory(prefix=f".{out.name}.", dir=existing, ignore_cleanup_errors=True) as temporary:
        stage = Path(temporary) / out.name
        stage.mkdir()
        yield stage
        if not out.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            stage.replace(out)
            return
        old = {*PARTS, *OPTIONAL_PARTS, *FILES} if any((out / part).is_dir() for part in PARTS) else set()
        for name in old | {path.name for path in stage.iterdir()}:
            if (out / name).is_dir() and not (out / name).is_symlink():
                shutil.rmtree(out / name)
            else:
                (out / name).unlink(missing_ok=True)
        for path in stage.iterdir():
            path.replace(out / path.name)


def convert_parts(source: Path, out: Path, store: Any, excluded: Sequence[str]) -> list[str]:
    """Write the parts of a model folder, except the excluded parts, and its files; return the names of the parts written."""
    from lanternpp.api.rates import FILE as RATES
    from lanternpp.evaluation.classifier import CLASSIFIER, has_classifier
    from lanternpp.nn import checkpoints

    present = [
        part for part in (*PARTS, *OPTIONAL_PARTS) if (source / part).is_dir() and part not in excluded
    ]
    parts = [part for part in present if part != CLASSIFIER or has_classifier(source)]
    for part in parts:
        if part not in PARTS or "kind" not in checkpoints.load_config(source / part):
            # The reference of a classifier was computed with exactly its weights, and other programs' drafters keep their layout.
            shutil.copytree(source / part, out / part, ignore=shutil.ignore_patterns(*ONLY_TRAINING))
            continue
        config, tensors = checkpoints.load(source / part)
        unquantised = [name for name in tensors if name.endswith("codebook")]
        checkpoints.save(out / part, config, tensors, store, unquantised)
        copy_provenance(source / part, out / part, store)
    for name in (*FILES, README, *(f"{part}/{RATES}" for part in parts)):
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    return parts


def copy_provenance(source: Path, out: Path, store: Any, **usual: Any) -> None:
    """Write how a part was made, or `usual` if it is not known, and how its weights are stored."""
    path = source / PROVENANCE
    provenance = read_object(path) if path.is_file() else usual
    if provenance:
        write_json(out / PROVENANCE, provenance | {"store": store})
