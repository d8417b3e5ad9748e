"""The defaults and limits of a server, and the checks before it starts: packages, API keys, proxies.

This module does not import torch, so that a mistake is reported quickly.
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

from lanternpp.api.options import AUTO, MAX_SECONDS, MethodDials, RuleDials, check_method, names
from lanternpp.errors import InputError, counted
from lanternpp.util.options import Option

if TYPE_CHECKING:
    from lanternpp.api.options import Settings
    from lanternpp.api.pipeline import Pipeline

KEYS = "LANTERNPP_API_KEYS"  # environment variable: keys separated by commas or blanks
EDITS = "/v1/images/edits"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")
MIN_KEY_CHARS = 16


def power_of_two(slots: int) -> None:
    """Raise InputError where a number of slots is not a power of two."""
    if slots < 1 or slots & (slots - 1):
        raise InputError(f"{slots} slots are not a power of two; use 1, 2, 4, 8 ...")


@dataclass(frozen=True)
class ServerConfig:
    """The defaults and limits of a server.

    method and overrides (fields of `Settings`): the defaults of requests. keys: API keys; without keys, every client may draw.
    hosts: accepted names in the Host header; empty: any.
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
            le=MAX_SECONDS,
        ),
    ] = 300.0
    prompt_limit: Annotated[int, Option("Most characters of a prompt.", ge=1)] = 1000
    body_limit: Annotated[int, Option("Most bytes of a request.", ge=1)] = 1 << 20
    upload_limit: Annotated[int, Option("Most bytes of a request that has pictures to edit.", ge=1)] = (
        16 << 20
    )
    page: Annotated[bool, Option("Serve the page at /.", negative=True)] = True

    def settings(self, pipe: Pipeline, method: str | None, overrides: Mapping[str, Any]) -> Settings:
        """Return the settings of a request: its own dials, else the dials that the server was started with. Raises InputError.

        method: the request's; None: the server's. overrides: the dials of the request. The parts and dials that the server
        was started with belong to its own method, so a request for another method gets the defaults of that method, and a
        request for another rule those of that rule.
        """
        method = self.method if method is None else check_method(method)
        replaced: tuple[str, ...] = ()
        if pipe.chosen(method).method != pipe.chosen(self.method).method:
            replaced = names(MethodDials)
        elif "accept" in overrides and overrides["accept"] != self.settings(pipe, None, {}).accept:
            replaced = names(RuleDials)
        defaults = {name: value for name, value in self.overrides.items() if name not in replaced}
        return pipe.settings(method, **{**defaults, **overrides, "batch_size": 1})


def require() -> None:
    """Raise InputError unless the packages for serving are installed. They are not imported, which would take seconds."""
    for name in PACKAGES:
        if find_spec(name) is None:
            raise InputError(
                f"serving needs {name}, which is not installed; run pip install 'lanternpp[serve]'"
            )


def check_proxies(option: str | None) -> tuple[str, ...]:
    """Return the addresses and networks of --forwarded-allow-ips. Raises InputError."""
    proxies = tuple(proxy.strip() for proxy in (option or "").split(",") if proxy.strip())
    for proxy in proxies:
        try:
            if proxy != "*":
                ip_network(proxy)
        except ValueError:
            raise InputError(
                f"--forwarded-allow-ips {proxy!r} is neither an address nor a network; use such as 127.0.0.1 or 10.0.0.0/8"
            ) from None
    return proxies


def host_name(host: str) -> str:
    """Return the name in a Host header, in lower case, without its port and a last dot."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:  # an incomplete IPv6 address
        return ""


def gather_keys(options: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Gather API keys from options, the environment, and a file with one key per line.

    Raises InputError for a key that cannot be sent in a header, or that is short enough to be guessed.
    """
    keys = [*options, *os.environ.get(KEYS, "").replace(",", " ").split()]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise InputError(f"--api-key-file {str(file)!r} cannot be read: {error}") from None
        file_keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not file_keys:
            raise InputError(f"--api-key-file {str(file)!r} has no keys; write one per line")
        keys += file_keys
    for key in keys:
        if len(key) < MIN_KEY_CHARS or not key.isascii() or any(c.isspace() for c in key):
            raise InputError(
                f"an API key of {counted(len(key), 'character')} cannot be used; take {MIN_KEY_CHARS} or more ASCII characters without blanks"
            )
    return tuple(dict.fromkeys(keys))
