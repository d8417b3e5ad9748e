"""Prompts to measure with, from a file of the user, a benchmark or a model folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lanternpp.errors import InputError
from lanternpp.models.hub import TIMEOUT, hub_id, quiet_downloads
from lanternpp.nn.files import input_errors
from lanternpp.util import files
from lanternpp.util.jsonfile import MAX_LOG_BYTES, read_json, read_lines, read_text

PROMPTS = "prompts.txt"
REMEDY = "give one prompt per line, captions of MS-COCO (.json), PartiPrompts.tsv, or a .jsonl of objects with a prompt"
GENEVAL = {"tag", "include", "prompt"}  # keys of GenEval's file of prompts


def read_prompts(path: Path | None, model: Path) -> list[str]:
    """Read the prompts of a benchmark's file, or of a text with one prompt per line; empty lines and lines that begin with # are left out.

    path: a file, or OWNER/NAME/FILE of a dataset on the hub; None: the model folder's own file. Raise InputError without prompts.
    """
    model_file = model / PROMPTS
    if path is None and not model_file.is_file():
        raise InputError(f"{model} brings no {PROMPTS}; give --prompts FILE with one prompt per line")
    source = fetch(path or model_file)
    suffix = source.suffix.lower()
    if suffix == ".json":
        lines = captions(read_json(source, REMEDY, MAX_LOG_BYTES), source)
    elif suffix == ".jsonl":
        lines = [row["prompt"] for row in read_rows(source)]
    else:
        text = read_text(source, "give a file with one prompt per line", MAX_LOG_BYTES)
        if suffix == ".tsv":
            # Quotes are part of a prompt.
            header, *rows = [line.split("\t") for line in text.split("\n") if line] or [[]]
            if "Prompt" not in header:
                raise InputError(f"prompts {source} have no column Prompt; {REMEDY}")
            column = header.index("Prompt")
            lines = [row[column] for row in rows if len(row) > column]
        else:
            lines = [line for line in text.split("\n") if not line.startswith("#")]
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"prompts {source} holds none; write one prompt per line")
    return prompts


def fetch(path: Path) -> Path:
    """Return a path of this machine unchanged; fetch OWNER/NAME/FILE of a dataset from the hub, once. Raise InputError."""
    source = hub_id(path.as_posix())
    if path.exists() or source is None or source.file is None:
        return path
    from huggingface_hub import hf_hub_download

    quiet_downloads()
    with input_errors(f"prompts {path} are not here, nor to be had from the hub", "name a file that is"):
        options: dict[str, Any] = {"revision": source.revision, "etag_timeout": TIMEOUT}
        return Path(hf_hub_download(source.repo, source.file, repo_type="dataset", **options))


def captions(content: Any, source: Path) -> list[str]:
    """Return the longest caption of each picture, white space included, as in LANTERN's evaluation; of these the first.

    content: MS-COCO's annotations, Karpathy's splits (the pictures of `test`), or a list of prompts. Raise InputError for other content.
    """
    try:
        if isinstance(content, list):
            return [prompt.strip() for prompt in content]
        by_picture: dict[Any, list[str]] = {}
        for row in content.get("annotations", ()):
            by_picture.setdefault(row["image_id"], []).append(row["caption"])
        if by_picture:
            return [max(texts, key=len).strip() for texts in by_picture.values()]
        splits = [row["sentences"] for row in content.get("images", ()) if row["split"] == "test"]
        return [max((sentence["raw"] for sentence in texts), key=len).strip() for texts in splits]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(f"prompts {source} have no layout known here; {REMEDY}") from None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a .jsonl, such as GenEval's evaluation_metadata.jsonl; raise InputError for an object without a prompt."""
    return [row for _, row in read_lines(path, "prompt", REMEDY)]


def write_geneval(rows: Sequence[Mapping[str, Any]], pictures: Sequence[tuple[int, Path]], to: Path) -> None:
    """Write the folders that GenEval's scorer reads: 00000/metadata.jsonl and 00000/samples/0000.png, and so on.

    rows: of GenEval's file of prompts; pictures: the index of the prompt, and the file, of each picture.
    """
    for index, row in enumerate(rows):
        folder = to / f"{index:05d}"
        files.write_text(folder / "metadata.jsonl", json.dumps(row) + "\n")
        for i, picture in enumerate(path for prompt, path in pictures if prompt == index):
            with files.replacing(folder / "samples" / f"{i:04d}.png") as temporary:
                shutil.copyfile(picture, temporary)


def spread(prompts: Sequence[str], count: int) -> list[str]:
    """Return `count` prompts: an evenly spread selection if there are more, the prompts in turn if there are fewer."""
    if count < len(prompts):
        return [prompts[i * len(prompts) // count] for i in range(count)]
    return [prompts[i % len(prompts)] for i in range(count)]
