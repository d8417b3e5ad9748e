"""`lanternpp convert`: write a model as a folder in lanternpp's format, in another number format if need be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from lanternpp.cli.models import megabytes, size
from lanternpp.cli.output import writable_folder
from lanternpp.errors import InputError
from lanternpp.util import files
from lanternpp.util.jsonfile import read_object

PARTS = ("tokenizer", "target", "drafter", "parallel")
REST = ("independent", "classifier", "text")  # other parts that a model may have
FILES = ("defaults.json", "embeddings.safetensors", "prompts.txt", "synonyms.txt")
STORES = ("float32", "bfloat16", "int8", "int6")

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model folder, a published checkpoint, or a hub id.")
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; made where it is missing.")]
Storage = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="float32, bfloat16, int8 or int6: 8 or 6 bits a weight and a scale per output channel. "
        "Default: bfloat16 of a published checkpoint, int8 of a folder that lanternpp wrote.",
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--vq",
        metavar="FILE|HUB_ID",
        help="The image tokenizer of a published checkpoint, OWNER/NAME/FILE on the hub.",
    ),
]
Encoder = Annotated[
    Path | None, typer.Option("--text", metavar="DIR", help="The text encoder of a published checkpoint.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the model that OUT holds.")]
Size = Annotated[
    str | None,
    typer.Option("--size", metavar="PIXELS|WxH", help="The size of its pictures, where no file says."),
]


def convert(
    model: Model,
    out: Out,
    store: Storage = None,
    vq: Tokenizer = None,
    text: Encoder = None,
    side: Size = None,
    overwrite: Overwrite = False,
) -> None:
    """Write MODEL as the folder OUT, which is quick to read and leaves out what only training needs.

    OUT appears only when all of it is written.
    """
    if store not in (None, *STORES):
        raise InputError(f"--store {store!r} is unknown; use {', '.join(STORES)}")
    if text is not None and not text.exists():
        raise InputError(f"--text {str(text)!r} does not exist; give a folder")
    inside = Path(model).exists() and Path(model).resolve().is_relative_to(out.resolve())
    if out.exists() and (not out.is_dir() or inside):
        raise InputError(f"output {str(out)!r} is a file, or contains MODEL; name a new folder")
    if not overwrite and any((out / name).exists() for name in (*PARTS, "config.json")):
        raise InputError(
            f"output {str(out)!r} holds a model; name a new folder, or replace it with --overwrite"
        )
    writable_folder(out)

    from lanternpp.api.model import model_folder
    from lanternpp.models.hub import hub_id

    if vq and not Path(vq).exists() and not hub_id(vq):
        raise InputError(f"--vq {vq!r} does not exist; give a file, or OWNER/NAME/FILE of the hub")
    source = model_folder(model)
    given = {"tokenizer": model_folder(vq) if vq else None, "text": text, "size": side}
    if (source / "target").is_dir():
        if any(given.values()):
            raise InputError(f"--vq, --text and --size are for published checkpoints; {model!r} is none")
        store = store or "int8"
        with staged(out) as stage:
            parts = rewrite(source, stage, store)
    else:
        store = store or "bfloat16"
        called = source.resolve().name if Path(model).exists() else model
        with staged(out) as stage:
            parts = adopt(source, stage, store, given, called)
    typer.echo(f"{out}: {', '.join(parts)}; {megabytes(size(out))} in {store}")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """An empty folder whose contents become those of OUT when the block ends; an older model in OUT is removed."""
    place = out if out.exists() else out.parent
    made = [path for path in (place, *place.parents) if not path.exists()]
    place.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(prefix=f".{out.name}.", dir=place, ignore_cleanup_errors=True) as temporary:
            stage = Path(temporary) / out.name
            stage.mkdir()
            yield stage
            if out == place:
                for name in {*PARTS, *REST, *FILES, *(path.name for path in stage.iterdir())}:
                    remove(out / name)
                for path in stage.iterdir():
                    path.replace(out / path.name)
            else:
                stage.replace(out)
    except BaseException:
        with suppress(OSError):
            for path in made:
                path.rmdir()
        raise


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def rewrite(source: Path, out: Path, store: Any) -> list[str]:
    """Write the parts of a folder that lanternpp wrote; returns the names of the parts."""
    from lanternpp.evaluation.classifier import CLASSIFIER, REFERENCE, has_classifier
    from lanternpp.nn import checkpoints

    parts = [part for part in PARTS if (source / part).is_dir()]
    for part in parts:
        config, tensors = checkpoints.load(source / part)
        keep = [name for name in tensors if name.endswith("codebook")]
        checkpoints.save(out / part, config, tensors, store, keep)
        provenance = source / part / "provenance.json"
        if provenance.is_file():
            facts = read_object(provenance) | {"store": store}
            files.write_text(out / part / provenance.name, json.dumps(facts, indent=2) + "\n")
    for name in (*FILES, "README.md"):
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    if has_classifier(source):  # unchanged: its reference was computed with exactly these weights
        (out / CLASSIFIER).mkdir(exist_ok=True)
        for name in (checkpoints.CONFIG, checkpoints.WEIGHTS, REFERENCE, "provenance.json"):
            if (source / CLASSIFIER / name).is_file():
                shutil.copyfile(source / CLASSIFIER / name, out / CLASSIFIER / name)
        parts.append(CLASSIFIER)
    if (source / "text").is_dir():
        shutil.copytree(source / "text", out / "text", dirs_exist_ok=True)
        parts.append("text")
    return parts


def adopt(source: Path, out: Path, store: Any, given: dict[str, Any], called: str) -> list[str]:
    """Write a published checkpoint with its tokenizer, and its text encoder if that is on this machine; returns the parts."""
    from lanternpp.api.model import DEFAULTS, read_target
    from lanternpp.util.devices import DTYPES

    target = read_target(source, DTYPES["bfloat16" if store == "bfloat16" else "float32"], given=given)
    parts = target.save(out, store)
    facts = {"converted from": called, "store": store}
    files.write_text(out / "target" / "provenance.json", json.dumps(facts, indent=2) + "\n")
    files.write_text(out / DEFAULTS, json.dumps(dict(target.defaults), indent=2) + "\n")
    return parts
