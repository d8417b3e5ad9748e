"""`lanternpp serve --ray`: what it adds to the server of one process."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING

import typer

from lanternpp.cli.terminal import say, tell_effect

if TYPE_CHECKING:
    from lanternpp.pipeline import Pipeline
    from lanternpp.serve.ray_serve import Opened, Plan
    from lanternpp.serve.terms import Terms
    from lanternpp.tuning.batches import Choice


def deploy(
    address: str,
    replicas: int | None,
    plan: Plan,
    calibrate: bool,
    host: str,
    bound: socket.socket,
    drain: float,
) -> None:
    """Serve with replicas until a signal, at the address of a socket that proved to be free. Raises InputError."""
    from lanternpp.serve.ray_serve import run

    out = sys.stdout  # Ray has it otherwise until the end
    port = bound.getsockname()[1]
    bound.close()

    def ready(url: str, opened: Opened) -> None:
        tell_effect(opened.effect)
        typer.echo(
            f"{url}: {opened.model} with {plan.terms.method} in {opened.dtype}, {opened.replicas} replicas of {plan.slots} "
            "slots",
            file=out,
        )

    if not run(address, replicas, plan, measured if calibrate else None, host, port, drain, ready):
        say("serve", f"not all pictures were finished within {drain:g} s")


def measured(pipe: Pipeline, terms: Terms, slots: int) -> Choice:
    """Which tree to draw with at which size, measured on a worker now or before."""
    from lanternpp.tuning.batches import calibrate, sizes
    from lanternpp.tuning.lane import usual_conditions

    return calibrate(pipe, terms.settings(pipe, None, {}), sizes(slots), usual_conditions(pipe))
