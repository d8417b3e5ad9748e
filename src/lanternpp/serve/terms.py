"""What a server offers, and to whom."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lanternpp.errors import InputError
from lanternpp.methods import METHODS, method
from lanternpp.pipeline import Pipeline
from lanternpp.settings import DIALS, Settings

KEYS = "LANTERNPP_API_KEYS"  # keys separated by commas or blanks
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SHORTEST = 16  # characters of a key


@dataclass(frozen=True)
class Terms:
    """The limits and defaults of a server. No key: whoever reaches it may draw."""

    method: str = "lantern++"
    overrides: Mapping[str, Any] = field(default_factory=dict)  # fields of `Settings`, as `Pipeline.settings`
    keys: Sequence[str] = ()
    hosts: Sequence[str] = ()  # names by which it may be called; none: any
    deadline: float | None = None  # seconds for a picture, whatever a request asks for
    body: int = 1 << 20  # most bytes of a request
    prompt: int = 1000  # most characters of a prompt

    def __post_init__(self) -> None:
        method(self.method)
        for name, value in (
            ("deadline", self.deadline),
            ("body limit", self.body),
            ("prompt limit", self.prompt),
        ):
            if value is not None and value <= 0:
                raise InputError(f"{name} {value} is not above 0")
        for key in self.keys:
            if len(key) < SHORTEST or not key.isascii() or any(c.isspace() for c in key):
                raise InputError(
                    f"an API key of {len(key)} characters will not do; use {SHORTEST} or more ASCII characters without blanks"
                )

    def settings(self, pipe: Pipeline, named: str | None, given: Mapping[str, Any]) -> Settings:
        """The settings of a request: what it gives, then what the server was started with. Raises InputError.

        The server's dials are its own method's; a request for another method gets that one's defaults.
        """
        name = named or self.method
        if name not in METHODS:
            method(name)
        parts = {*DIALS, "proposer", "accept"}
        base = {k: v for k, v in self.overrides.items() if name == self.method or k not in parts}
        return pipe.settings(name, **{**base, **given, "batch_size": 1})


def gather_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """API keys from options, from a file of one a line, and from the environment. Raises InputError."""
    found = [*given, *os.environ.get(KEYS, "").replace(",", " ").split()]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise InputError(f"--api-key-file {str(file)!r} cannot be read: {error}") from None
        own = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not own:
            raise InputError(f"--api-key-file {str(file)!r} has no keys; write one a line")
        found += own
    return tuple(dict.fromkeys(found))
