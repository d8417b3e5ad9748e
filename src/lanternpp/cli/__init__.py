"""The command line: one file per verb. Errors are one line on stderr and exit status 2.

Nothing here imports torch at the top, so that help and refusals are quick.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from lanternpp import __version__
from lanternpp.cli import (
    bench,
    compare,
    convert,
    eval,
    generate,
    gpu_report,
    models,
    serve,
    throughput,
    train,
    tune,
    warm,
)
from lanternpp.cli.terminal import one_line_warnings, say
from lanternpp.errors import InputError
from lanternpp.util.registry import HERE

RETIRED = {"floor": "bench --profile"}  # verbs of earlier versions, and what does their work now


class Verbs(TyperGroup):
    """The group of verbs; an interrupt of any of them is one line and status 130."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb of this name. InputError where it is a retired one."""
        if cmd_name in RETIRED:
            raise InputError(f"`{cmd_name}` is now `{RETIRED[cmd_name]}`")
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("lanternpp: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(cls=Verbs, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(generate.generate)
app.command()(compare.compare)
app.command()(bench.bench)
app.command("eval")(eval.evaluate)
app.command()(train.train)
app.command()(tune.tune)
app.command()(throughput.throughput)
app.command()(warm.warm)
app.command()(gpu_report.gpu_report)
app.command()(serve.serve)
app.command()(models.models)
app.command()(convert.convert)


def show_version(requested: bool) -> None:
    """Print the version and leave."""
    if requested:
        typer.echo(f"lanternpp {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Visual autoregressive models that draw faster: speculative decoding with relaxed acceptance."""


def with_values(args: Sequence[str]) -> list[str]:
    """Arguments in which a `--ray` that nobody gave a value means this machine."""
    bare = [
        i for i, arg in enumerate(args) if arg == "--ray" and (args[i + 1 : i + 2] or ["-"])[0][:1] == "-"
    ]
    return [part for i, arg in enumerate(args) for part in ((arg, "local") if i in bare else (arg,))]


def main(args: Sequence[str] | None = None) -> None:
    """The console script: runs a verb, then exits with its status."""
    command = typer.main.get_command(app)
    HERE[:] = [""]  # the current folder
    args = with_values(sys.argv[1:] if args is None else args)
    try:
        with one_line_warnings():
            status = command.main(args, prog_name="lanternpp", standalone_mode=False)
            sys.stdout.flush()
    except InputError as error:
        say("error", error)
        status = 2
    except OSError as error:
        if error.errno == errno.ENOSPC:
            say(
                "error",
                f"the disk is full ({error.filename or 'while writing'}); free some room and run it again",
            )
        elif error.filename is None:  # no file of the user's
            raise
        else:
            say("error", f"{error.filename}: {error.strerror}")
        status = 2
    except TyperException as error:
        status = refuse(error)
    sys.exit(status if isinstance(status, int) else 0)


def refuse(error: TyperException) -> int:
    """A wrong use of the command line as one line; status 2. No message means that help was printed instead."""
    message = error.format_message()
    if not message:
        return 0
    faults = getattr(error.__cause__, "errors", None)
    if faults:  # a value of the wrong type: say which value
        message += f", not {faults()[0]['input']!r}"
    say("error", message)
    return 2
