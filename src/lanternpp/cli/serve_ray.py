"""`lanternpp serve --ray`: the server as replicas on a Ray cluster."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING

import typer

from lanternpp.cli.terminal import say, tell_effect

if TYPE_CHECKING:
    from lanternpp.serve.app import ServerSpec
    from lanternpp.serve.ray_serve import ReplicaInfo


def deploy(
    address: str,
    replicas: int | None,
    spec: ServerSpec,
    bound: socket.socket,
    drain: float,
    proxies: tuple[str, ...],
) -> None:
    """Serve with replicas at a socket until a signal. Raises InputError."""
    from lanternpp.serve.ray_serve import run
    from lanternpp.serve.server import url

    out = sys.stdout  # `cluster` redirects sys.stdout while Ray runs

    def ready(info: ReplicaInfo) -> None:
        tell_effect(info.effect)
        typer.echo(
            f"{url(bound)}: {info.model} with {spec.config.method} in {info.dtype}, {info.replicas} replicas of {spec.config.slots} "
            "slots",
            file=out,
        )

    if not run(address, replicas, spec, bound, drain, ready, proxies):
        say("serve", "not all pictures were finished")
