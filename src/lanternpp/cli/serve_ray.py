"""`lanternpp serve --ray`: what it adds to the server of one process."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING

import typer

from lanternpp.cli.terminal import say, tell_effect

if TYPE_CHECKING:
    from lanternpp.serve.app import Plan
    from lanternpp.serve.ray_serve import Opened


def deploy(
    address: str,
    replicas: int | None,
    plan: Plan,
    bound: socket.socket,
    drain: float,
    proxies: tuple[str, ...],
) -> None:
    """Serve with replicas at a socket until a signal. Raises InputError."""
    from lanternpp.serve.ray_serve import run

    out = sys.stdout  # Ray has it otherwise until the end

    def ready(url: str, opened: Opened) -> None:
        tell_effect(opened.effect)
        typer.echo(
            f"{url}: {opened.model} with {plan.terms.method} in {opened.dtype}, {opened.replicas} replicas of {plan.slots} "
            "slots",
            file=out,
        )

    if not run(address, replicas, plan, bound, drain, ready, proxies):
        say("serve", f"not all pictures were finished within {drain:g} s")
