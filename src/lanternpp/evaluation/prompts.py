"""Prompts to measure with: a file of the user's or of a benchmark, or those that a model folder brings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lanternpp.errors import InputError
from lanternpp.models.hub import TIMEOUT, hub_id, quiet_downloads
from lanternpp.nn.files import wrong_file
from lanternpp.util import files
from lanternpp.util.jsonfile import LINES, read_json, read_lines, read_text

PROMPTS = "prompts.txt"
REMEDY = "give one prompt per line, captions of MS-COCO (.json), PartiPrompts.tsv, or a .jsonl of objects with a prompt"
GENEVAL = {"tag", "include", "prompt"}  # keys of GenEval's file of prompts


def read_prompts(path: Path | None, model: Path) -> list[str]:
    """The prompts of a file: a benchmark's, or one per line, empty lines and lines that begin with # left out.

    path None: the model folder's own; OWNER/NAME/FILE: a file of a dataset on the hub. Raises InputError where there is none.
    """
    model_file = model / PROMPTS
    if path is None and not model_file.is_file():
        raise InputError(f"{model} brings no {PROMPTS}; give --prompts FILE with one prompt per line")
    source = fetched(path or model_file)
    kind = source.suffix.lower()
    if kind == ".json":
        found = captions(read_json(source, REMEDY), source)
    elif kind == ".jsonl":
        found = [row["prompt"] for row in read_rows(source)]
    else:
        text = read_text(source, "give a file with one prompt per line", LINES)
        if kind == ".tsv":
            found = table_column(text, source)
        else:
            found = [line for line in text.split("\n") if not line.startswith("#")]
    prompts = [prompt.strip() for prompt in found if prompt.strip()]
    if not prompts:
        raise InputError(f"prompts {source} holds none; write one prompt per line")
    return prompts


def fetched(path: Path) -> Path:
    """A path on this machine as it is, or a file of a dataset on the hub, which is fetched once. InputError."""
    source = hub_id(path.as_posix())
    if path.exists() or source is None or source.file is None:
        return path
    from huggingface_hub import hf_hub_download

    quiet_downloads()
    with wrong_file(f"prompts {path} are not here, nor to be had from the hub", "name a file that is"):
        return Path(
            hf_hub_download(
                source.repo, source.file, repo_type="dataset", revision=source.revision, etag_timeout=TIMEOUT
            )
        )


def captions(content: Any, source: Path) -> list[str]:
    """The longest caption of each picture, as in LANTERN's evaluation; the first of several that are as long.

    content: MS-COCO's annotations, Karpathy's splits (the pictures of `test`), or a list of prompts. Raises InputError.
    """
    try:
        if isinstance(content, list):
            return [prompt.strip() for prompt in content]
        by_picture: dict[Any, list[str]] = {}
        for row in content.get("annotations", ()):
            by_picture.setdefault(row["image_id"], []).append(row["caption"].strip())
        for place, row in enumerate(content.get("images", ()) if not by_picture else ()):
            if row["split"] == "test":
                by_picture[place] = [sentence["raw"].strip() for sentence in row["sentences"]]
        return [max(texts, key=len) for texts in by_picture.values()]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(f"prompts {source} have no layout known here; {REMEDY}") from None


def table_column(text: str, source: Path) -> list[str]:
    """The column Prompt of a table with tabs, as PartiPrompts.tsv has it; quotes are part of a prompt. InputError."""
    head, *rows = [line.split("\t") for line in text.split("\n") if line] or [[]]
    if "Prompt" not in head:
        raise InputError(f"prompts {source} have no column Prompt; {REMEDY}")
    return [row[head.index("Prompt")] for row in rows if len(row) > head.index("Prompt")]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl, each with a prompt, such as GenEval's evaluation_metadata.jsonl. InputError."""
    return [row for _, row in read_lines(path, "prompt", REMEDY)]


def write_geneval(rows: Sequence[Mapping[str, Any]], pictures: Sequence[tuple[int, Path]], to: Path) -> None:
    """GenEval's folders, which its scorer reads: 00000/metadata.jsonl and 00000/samples/0000.png, and so on.

    rows: of its file of prompts; pictures: files with the place of their prompt.
    """
    for place, row in enumerate(rows):
        folder = to / f"{place:05d}"
        files.write_text(folder / "metadata.jsonl", json.dumps(row) + "\n")
        for i, picture in enumerate(path for prompt, path in pictures if prompt == place):
            with files.replacing(folder / "samples" / f"{i:04d}.png") as temporary:
                shutil.copyfile(picture, temporary)


def spread(prompts: Sequence[str], count: int) -> list[str]:
    """`count` of some prompts: evenly over them where they are more, in turn where they are fewer."""
    return [
        prompts[i * len(prompts) // count if count < len(prompts) else i % len(prompts)] for i in range(count)
    ]
