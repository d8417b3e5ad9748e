"""The defaults and limits of a server, and what is checked before it starts: packages, API keys, proxies.

Nothing here imports torch, so that a mistake is reported quickly.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from lanternpp.api.options import AUTO, LONGEST, DraftDials, PartDials, RuleDials, check_method, names
from lanternpp.errors import InputError
from lanternpp.util.options import Option, declared

if TYPE_CHECKING:
    from lanternpp.api.options import Settings
    from lanternpp.api.pipeline import Pipeline

KEYS = "LANTERNPP_API_KEYS"  # environment variable: keys separated by commas or blanks
EDITS = "/v1/images/edits"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")
EXTRA = "serving needs {name}, which is not installed; run pip install 'lanternpp[serve]'"
MIN_KEY_CHARS = 16


def power_of_two(slots: int) -> None:
    """InputError where a number of slots is not a power of two."""
    if slots < 1 or slots & (slots - 1):
        raise InputError(f"{slots} slots are not a power of two; use 1, 2, 4, 8 ...")


@dataclass(frozen=True)
class ServerConfig:
    """The defaults and limits of a server. Raises InputError.

    method and overrides (fields of `Settings`): the defaults of requests. keys: API keys; without keys, everybody who can
    connect may draw. hosts: accepted names in the Host header; empty: any.
    """

    heading = "Server"
    method: str = AUTO
    overrides: Mapping[str, Any] = field(default_factory=dict)
    keys: Sequence[str] = ()
    hosts: Sequence[str] = ()
    slots: Annotated[
        int,
        Option(
            "Most pictures of the same settings drawn at once: 1, 2, 4, 8 ...",
            validate=power_of_two,
        ),
    ] = 8
    queue: Annotated[int, Option("Most pictures that wait; further requests get 429.", ge=1)] = 64
    max_engines: Annotated[
        int,
        Option("Most engines kept; each has the caches for its settings and batch size.", ge=1),
    ] = 4
    deadline: Annotated[
        float | None,
        Option(
            "Seconds after which an unfinished picture is given up; its request gets 504.",
            gt=0,
            le=LONGEST,
        ),
    ] = 300.0
    prompt_limit: Annotated[int, Option("Most characters of a prompt.", ge=1)] = 1000
    body_limit: Annotated[int, Option("Most bytes of a request.", ge=1)] = 1 << 20
    upload_limit: Annotated[int, Option("Most bytes of a request that has pictures to edit.", ge=1)] = (
        16 << 20
    )
    page: Annotated[bool, Option("Serve the page at /.", negative=True)] = True

    def __post_init__(self) -> None:
        check_method(self.method)
        check_keys(self.keys)
        for name, option in declared(ServerConfig).items():
            option.check(getattr(self, name), name)

    def settings(self, pipe: Pipeline, method: str | None, given: Mapping[str, Any]) -> Settings:
        """The settings of a request: what the request gives, else what the server was started with.

        method: the request's; None: the server's. given: the dials of the request. The parts and dials that the server was
        started with belong to its own method, so a request for another method gets that method's defaults. Raises
        InputError.
        """
        default = pipe.chosen(self.method).method
        chosen = pipe.chosen(check_method(method)).method if method else default
        of_the_method = names(PartDials, DraftDials, RuleDials)
        base = {k: v for k, v in self.overrides.items() if chosen == default or k not in of_the_method}
        return pipe.settings(method or self.method, **{**base, **given, "batch_size": 1})


def require() -> None:
    """Raise InputError unless the packages for serving are installed. They are not imported: that takes seconds."""
    for name in PACKAGES:
        if find_spec(name) is None:
            raise InputError(EXTRA.format(name=name))


def check_proxies(given: str | None) -> tuple[str, ...]:
    """The addresses of --forwarded-allow-ips. Raises InputError."""
    found = tuple(part.strip() for part in (given or "").split(",") if part.strip())
    for part in found:
        try:
            if part != "*":
                ip_network(part)
        except ValueError:
            raise InputError(
                f"--forwarded-allow-ips {part!r} is neither an address nor a network; use such as 127.0.0.1 or 10.0.0.0/8"
            ) from None
    return found


def host_name(host: str) -> str:
    """The name in a Host header, in lower case, without its port and a last dot."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:  # an incomplete IPv6 address
        return ""


def check_keys(keys: Sequence[str]) -> None:
    """Raise InputError unless each key can be sent in a header and is long enough not to be guessed."""
    for key in keys:
        if len(key) < MIN_KEY_CHARS or not key.isascii() or any(c.isspace() for c in key):
            raise InputError(
                f"an API key of {len(key)} characters cannot be used; take {MIN_KEY_CHARS} or more ASCII characters without blanks"
            )


def gather_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """API keys from options, from a file with one key per line, and from the environment. Raises InputError."""
    found = [*given, *os.environ.get(KEYS, "").replace(",", " ").split()]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise InputError(f"--api-key-file {str(file)!r} cannot be read: {error}") from None
        in_file = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not in_file:
            raise InputError(f"--api-key-file {str(file)!r} has no keys; write one per line")
        found += in_file
    check_keys(found)
    return tuple(dict.fromkeys(found))
