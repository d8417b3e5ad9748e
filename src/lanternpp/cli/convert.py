"""`lanternpp convert`: a model folder once more, stored another way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from lanternpp.cli.models import megabytes, size
from lanternpp.errors import InputError

PARTS = ("tokenizer", "target", "drafter")
STORES = ("float32", "bfloat16", "int8")

Source = Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder.")]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="Where to write; made where it is missing.")]
Store = Annotated[
    str, typer.Option(help="float32, bfloat16, or int8: 8 bits a weight and a scale per output channel.")
]


def convert(source: Source, out: Target, store: Store = "int8") -> None:
    """Write MODEL again as OUT, without what only its training needs."""
    if store not in STORES:
        raise InputError(f"--store {store!r} is unknown; use {', '.join(STORES)}")
    if not source.is_dir():
        raise InputError(f"model {str(source)!r} is no folder; give the folder of a trained model")
    if out.exists() and (not out.is_dir() or out.samefile(source)):
        raise InputError(
            f"output {str(out)!r} is not another folder; name one that is new or another model's"
        )
    from lanternpp.models import DEFAULTS
    from lanternpp.nn import checkpoints

    parts = [part for part in PARTS if (source / part).is_dir()]
    if "target" not in parts:
        raise InputError(f"model {str(source)!r} has no target/; train one, or give the folder above it")
    for part in parts:
        config, tensors = checkpoints.load(source / part)
        keep = [name for name in tensors if name.endswith("codebook")]
        checkpoints.save(out / part, config, tensors, store, keep)  # type: ignore[arg-type]
        told = source / part / "provenance.json"
        if told.is_file():
            facts = json.loads(told.read_text(encoding="utf-8")) | {"store": store}
            checkpoints.write_text(out / part / told.name, json.dumps(facts, indent=2) + "\n")
    for name in (DEFAULTS, "README.md"):
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    typer.echo(f"{out}: {', '.join(parts)}; {megabytes(size(out))} in {store}")
