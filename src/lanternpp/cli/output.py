"""Where results go: checked before any model work, so that none is lost."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from lanternpp.errors import InputError


def png_path(path: Path) -> Path:
    """The path, if a PNG can be written there; its folder may still have to be made. Raises InputError."""
    if path.suffix.lower() != ".png":
        raise InputError(f"output {str(path)!r} does not end in .png; pictures are written as PNG")
    if path.exists() and not path.is_file():
        raise InputError(f"output {str(path)!r} is not a file; give a file name that ends in .png")
    folder = next(p for p in (path.absolute().parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            return path
    except OSError as error:
        raise InputError(f"output {str(path)!r} cannot be written: {folder}: {error.strerror}") from None


def default_path(prompt: str, seed: int) -> Path:
    """out/PROMPT-SEED.png, the prompt's words joined by hyphens."""
    slug = "-".join(re.findall(r"[^\W_]+", prompt.lower()))[:50].strip("-")
    return Path("out") / f"{slug or 'picture'}-{seed}.png"


def notes(prompt: str, seed: int, stats: Any) -> dict[str, str]:
    """What a PNG says of how it was made: enough to make it again, and nothing that varies between runs."""
    return {
        "prompt": prompt,
        "seed": str(seed),
        "images": str(stats.images),
        "model": stats.model,
        "settings": json.dumps(stats.settings, sort_keys=True),
        "versions": json.dumps(stats.versions, sort_keys=True),
    }
