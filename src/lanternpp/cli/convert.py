"""`lanternpp convert`: a model once more as a folder of ours, stored another way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from lanternpp.cli.models import megabytes, size
from lanternpp.cli.output import writable_folder
from lanternpp.errors import InputError

PARTS = ("tokenizer", "target", "drafter", "parallel")
STORES = ("float32", "bfloat16", "int8", "int6")

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model folder, a published checkpoint, or a hub id.")
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Where to write; made where it is missing.")]
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
) -> None:
    """Write MODEL as the folder OUT: the quickest to read, and without what only training needs."""
    if store not in (None, *STORES):
        raise InputError(f"--store {store!r} is unknown; use {', '.join(STORES)}")
    if text is not None and not text.exists():
        raise InputError(f"--text {str(text)!r} does not exist; give a folder")
    if out.exists() and (not out.is_dir() or (Path(model).exists() and out.samefile(model))):
        raise InputError(
            f"output {str(out)!r} is not another folder; name one that is new or another model's"
        )
    writable_folder(out)

    from lanternpp.hub import hub_id
    from lanternpp.models import model_folder

    if vq and not Path(vq).exists() and not hub_id(vq):
        raise InputError(f"--vq {vq!r} does not exist; give a file, or OWNER/NAME/FILE of the hub")
    source = model_folder(model)
    given = {"tokenizer": model_folder(vq) if vq else None, "text": text, "size": side}
    if (source / "target").is_dir():
        if any(given.values()):
            raise InputError(f"--vq, --text and --size are for published checkpoints; {model!r} is none")
        store = store or "int8"
        parts = rewrite(source, out, store)
    else:
        store = store or "bfloat16"
        parts = adopt(source, out, store, given, source.resolve().name if Path(model).exists() else model)
    typer.echo(f"{out}: {', '.join(parts)}; {megabytes(size(out))} in {store}")


def rewrite(source: Path, out: Path, store: Any) -> list[str]:
    """A folder of ours, part by part."""
    from lanternpp.evaluation.judge import JUDGE, REFERENCE, has_judge
    from lanternpp.evaluation.prompts import PROMPTS
    from lanternpp.models import DEFAULTS
    from lanternpp.nn import checkpoints
    from lanternpp.targets.text import FEATURES

    parts = [part for part in PARTS if (source / part).is_dir()]
    for part in parts:
        config, tensors = checkpoints.load(source / part)
        keep = [name for name in tensors if name.endswith("codebook")]
        checkpoints.save(out / part, config, tensors, store, keep)
        told = source / part / "provenance.json"
        if told.is_file():
            facts = json.loads(told.read_text(encoding="utf-8")) | {"store": store}
            checkpoints.write_text(out / part / told.name, json.dumps(facts, indent=2) + "\n")
    for name in (DEFAULTS, "README.md", FEATURES, PROMPTS):
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    if has_judge(source):  # as it is: its reference was made by these very weights
        (out / JUDGE).mkdir(exist_ok=True)
        for name in (checkpoints.CONFIG, checkpoints.WEIGHTS, REFERENCE, "provenance.json"):
            if (source / JUDGE / name).is_file():
                shutil.copyfile(source / JUDGE / name, out / JUDGE / name)
        parts.append(JUDGE)
    if (source / "text").is_dir():
        shutil.copytree(source / "text", out / "text", dirs_exist_ok=True)
        parts.append("text")
    return parts


def adopt(source: Path, out: Path, store: Any, given: dict[str, Any], called: str) -> list[str]:
    """A published checkpoint with its tokenizer, and with its text encoder where that lies on this machine."""
    from lanternpp.devices import DTYPES
    from lanternpp.models import DEFAULTS, read_target
    from lanternpp.nn import checkpoints

    target = read_target(source, DTYPES["bfloat16" if store == "bfloat16" else "float32"], given=given)
    parts = target.save(out, store)
    facts = {"converted from": called, "store": store}
    checkpoints.write_text(out / "target" / "provenance.json", json.dumps(facts, indent=2) + "\n")
    checkpoints.write_text(out / DEFAULTS, json.dumps(dict(target.defaults), indent=2) + "\n")
    return parts
