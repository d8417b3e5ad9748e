"""The command line: one file per verb. Errors are one line on stderr and exit status 2.

A verb's file is imported when the verb is given, and this module does not import torch, so that help and errors are quick.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from cyclopts import App, CycloptsError, UnknownOptionError, UnusedCliTokensError

from lanternpp import __version__
from lanternpp.api.options import DIALS
from lanternpp.api.options import RENAMED as DIALS_RENAMED
from lanternpp.cli.options import heading
from lanternpp.errors import InputError
from lanternpp.util.files import is_full
from lanternpp.util.registry import IMPORT_FOLDERS
from lanternpp.util.terminal import one_line_warnings, say

VERBS = {
    "generate": "Draw pictures of a prompt, or of every line of a file.",
    "compare": "Draw a prompt twice, by plain decoding and by a method, with the times under each.",
    "bench": "Compare methods on one model: speed, quality, throughput, profiles.",
    "tune": "Find the draft tree, or Jacobi window, that draws fastest with a method on this machine.",
    "models": "List models, methods and trees; download, convert or warm a model.",
    "serve": "Draw over HTTP, with OpenAI's Images API at /v1 and a page at /.",
    "train": "Train a drafter for a target, on pictures, on the target's own, or on codes.",
}
# Verbs and options of earlier versions, and their replacements.
RETIRED = {
    "floor": "bench --profile",
    "eval": "bench --quality",
    "throughput": "bench --batch-sizes",
    "gpu-report": "make gpu",
    "convert": "models convert",
    "warm": "models warm",
    "train drafter": "train",
    "train tokenizer": "python recipes/nature/tokenizer.py",
    "train target": "python recipes/nature/target.py",
    "train judge": "python recipes/nature/classifier.py",
    "train classifier": "python recipes/nature/classifier.py",
}
RENAMED = {
    **{f"--{old}": DIALS[new].option for old, new in DIALS_RENAMED.items()},
    "--lanes": "--max-engines",
    "--out": "-o",
    "--resume": "the default",
    "--taps": "--aux-layers",
    "--turn": "--condition-width",
}
MIN_COLUMNS = 20  # of a terminal, below which help and tables cannot be laid out


def with_values(args: Sequence[str]) -> list[str]:
    """Return the arguments with "local" added as the value of a `--ray` without a value."""
    filled = []
    for i, arg in enumerate(args):
        filled.append(arg)
        if arg == "--ray" and (i + 1 == len(args) or args[i + 1].startswith("-")):
            filled.append("local")
    return filled


def run_verb(args: Sequence[str]) -> object:
    """Run a verb and return its result: None, or an exit status."""
    requested = next(iter(args), "--help")
    for words in (requested, " ".join(args[:2])):
        if words in RETIRED:
            raise InputError(f"`{words}` is now `{RETIRED[words]}`")
    if "-" in args:
        raise InputError("'-' is no file: prompts are read from a named file, and pictures go to one")
    app = App(
        name="lanternpp",
        help="Visual autoregressive models that draw faster: speculative decoding with relaxed acceptance.",
        version=f"lanternpp {__version__}",
        help_format="plaintext",
        group_arguments=heading("Arguments"),
        group_parameters=heading("Options"),
        print_error=False,
        exit_on_error=False,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for verb, about in VERBS.items():
        app.command(f"{__name__}.{verb}:{verb}", name=verb, help=None if verb == requested else about)
    return app(args)


def main(args: Sequence[str] | None = None, run: Callable[[Sequence[str]], object] = run_verb) -> None:
    """Run a verb, or another command, as a console script does, and exit with the status that it returns."""
    IMPORT_FOLDERS[:] = [""]  # the current folder
    for name in ("stdout", "stderr"):  # None if it was closed, as by cron and pythonw
        setattr(sys, name, getattr(sys, name) or Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    if os.environ.get("COLUMNS", "").isdecimal() and int(os.environ["COLUMNS"]) < MIN_COLUMNS:
        del os.environ["COLUMNS"]
    if isinstance(sys.stdout, io.TextIOWrapper):  # the encoding may lack letters of prompts and paths
        sys.stdout.reconfigure(errors="backslashreplace")
    with suppress(ValueError):  # only the main thread can set handlers of signals
        # Linux discards a signal without a handler that is for the first process of a container.
        if os.getpid() == 1:
            signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
        # Closing the terminal ends a command as SIGTERM does. Under nohup SIGHUP stays ignored, and Windows has no SIGHUP.
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    args = with_values(sys.argv[1:] if args is None else args)
    status: object = 2
    try:
        with one_line_warnings():
            status = run(args)
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("lanternpp: interrupted", file=sys.stderr)
        status = 130
    except (InputError, CycloptsError) as error:
        say("error", sentence(error))
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # of torch, which is imported where it is needed
            raise
        say("error", f"{str(error).partition('. ')[0]}; use a smaller --batch-size, or a narrower --dtype")
    except OSError as error:
        # Windows reports a closed pipe as an invalid argument.
        is_invalid = sys.platform == "win32" and error.errno == errno.EINVAL
        if (isinstance(error, BrokenPipeError) or is_invalid) and unread():
            sys.exit(141)  # as a shell reports SIGPIPE
        path = error.filename or "while writing"
        if is_full(error):
            say("error", f"the disk is full ({path}); free some room and run it again")
        elif error.filename is None:  # the file is not the user's
            raise
        else:
            say("error", f"{path}: {error.strerror}")
    sys.exit(status if isinstance(status, int) else 0)


def unread() -> bool:
    """Return whether the reader of stdout has gone, as in `lanternpp models | head`; if so, silence Python's flush at exit."""
    try:
        print(flush=True)  # fails again, even if the buffer of stdout is empty
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def sentence(error: Exception) -> str:
    """Return an error of the arguments as one sentence."""
    if isinstance(error.__cause__, InputError):  # raised by the check of an option's value
        return str(error.__cause__)
    if isinstance(error, UnknownOptionError):
        option = (error.token.keyword or error.token.value).partition("=")[0]
        if option in RENAMED:
            return f"{option} is now {RENAMED[option]}"
    if isinstance(error, UnusedCliTokensError):
        words = " ".join(map(repr, error.unused_tokens or ()))
        return f"unexpected {words}: a value with spaces needs quotes, and a list has commas; see --help"
    return str(error)
