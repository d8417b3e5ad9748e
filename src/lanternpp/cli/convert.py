"""`lanternpp models convert`: a model as a folder in lanternpp's format, in another number format if need be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from lanternpp.cli.output import writable_folder
from lanternpp.errors import InputError
from lanternpp.util import files
from lanternpp.util.jsonfile import read_object
from lanternpp.util.options import Option

PARTS = ("tokenizer", "target", "drafter", "parallel")
REST = ("independent", "classifier", "text")  # other parts that a model may have
FILES = ("defaults.json", "embeddings.safetensors", "prompts.txt", "synonyms.txt")
STORES = ("float32", "bfloat16", "int8", "int6")


@dataclass(frozen=True)
class ConvertOptions:
    """The options of `models convert`."""

    store: Annotated[
        str | None,
        Option(
            "float32, bfloat16, int8 or int6: 8 or 6 bits a weight and a scale per output channel. Default: bfloat16 of a "
            "published checkpoint, int8 of a folder that lanternpp wrote."
        ),
    ] = None
    vq: Annotated[
        str | None,
        Option(
            "The image tokenizer of a published checkpoint, OWNER/NAME/FILE on the hub.",
            metavar="FILE|HUB_ID",
        ),
    ] = None
    text: Annotated[Path | None, Option("The text encoder of a published checkpoint.", metavar="DIR")] = None
    size: Annotated[
        str | None, Option("The size of its pictures, where no file says.", metavar="PIXELS|WxH")
    ] = None
    overwrite: Annotated[bool, Option("Replace the model that OUT holds.")] = False


def convert(model: str, out: Path, options: ConvertOptions) -> str:
    """Write a model as the folder `out`; returns what was written, in words. Raises InputError."""
    store, vq, text = options.store, options.vq, options.text
    if store not in (None, *STORES):
        raise InputError(f"--store {store!r} is unknown; use {', '.join(STORES)}")
    if text is not None and not text.exists():
        raise InputError(f"--text {str(text)!r} does not exist; give a folder")
    inside = Path(model).exists() and Path(model).resolve().is_relative_to(out.resolve())
    if out.exists() and (not out.is_dir() or inside):
        raise InputError(f"output {str(out)!r} is a file, or contains MODEL; name a new folder")
    if not options.overwrite and any((out / name).exists() for name in (*PARTS, "config.json")):
        raise InputError(
            f"output {str(out)!r} holds a model; name a new folder, or replace it with --overwrite"
        )
    writable_folder(out)

    from lanternpp.api.model import model_folder
    from lanternpp.models.hub import hub_id

    if vq and not Path(vq).exists() and not hub_id(vq):
        raise InputError(f"--vq {vq!r} does not exist; give a file, or OWNER/NAME/FILE of the hub")
    source = model_folder(model)
    given = {"tokenizer": model_folder(vq) if vq else None, "text": text, "size": options.size}
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
    return f"{out}: {', '.join(parts)}; {files.megabytes(files.size(out))} in {store}"


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
