"""What is checked before a server starts: its packages, API keys and address.

Nothing here imports torch, so that a mistake is reported quickly.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from ipaddress import ip_network
from pathlib import Path

from lanternpp.errors import InputError

KEYS = "LANTERNPP_API_KEYS"  # environment variable: keys separated by commas or blanks
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
EXTRA = "serving needs {name}, which is not installed; run pip install 'lanternpp[serve]'"
MIN_KEY_CHARS = 16


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
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise InputError(f"--api-key-file {str(file)!r} cannot be read: {error}") from None
        in_file = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not in_file:
            raise InputError(f"--api-key-file {str(file)!r} has no keys; write one per line")
        found += in_file
    check_keys(found)
    return tuple(dict.fromkeys(found))


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to this address; uvicorn listens on it later. port 0: any free one. Raises InputError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
    except OSError as error:
        raise InputError(f"--host {host!r} is no address of this machine: {error.strerror}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(0)  # a busy port is found here on some systems
    except OSError as error:
        bound.close()
        raise InputError(
            f"port {port} of {host} cannot be used ({error.strerror}); stop what uses it, or give another --port"
        ) from None
    return bound


def url(bound: socket.socket) -> str:
    """The URL at which a browser on this machine reaches the server."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
