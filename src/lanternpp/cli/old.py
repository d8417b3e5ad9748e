"""Verbs that are still made by Typer."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from typer.exceptions import TyperException

from lanternpp.cli import train
from lanternpp.errors import InputError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(train.train)


@app.callback()
def root() -> None:
    """Verbs."""


def run(args: Sequence[str]) -> object:
    """Run a verb."""
    try:
        status = typer.main.get_command(app).main(list(args), prog_name="lanternpp", standalone_mode=False)
    except TyperException as error:
        message = error.format_message()
        if not message:
            return 0
        faults = getattr(error.__cause__, "errors", None)
        if faults:  # a value of the wrong type: say which value
            message += f", not {faults()[0]['input']!r}"
        raise InputError(message) from None
    return status
