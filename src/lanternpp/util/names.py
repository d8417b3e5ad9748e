"""Names of files that pictures are written to, from what they show."""

from __future__ import annotations

import hashlib
import re


def slug(prompt: str) -> str:
    """A prompt's words joined by hyphens, at most 50 characters of any script."""
    return "-".join(re.findall(r"[^\W_]+", prompt.lower()))[:50].strip("-") or "picture"


def picture_name(prompt: str, seed: int) -> str:
    """SLUG-HASH-SEED.png: the same for the same prompt and seed, another for any other pair."""
    mark = hashlib.sha256(prompt.encode()).hexdigest()[:16]
    return f"{slug(prompt)}-{mark}-{seed}.png"
