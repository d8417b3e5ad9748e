"""Messages on stderr: errors and warnings of one line each, and progress bars."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from lanternpp.util.progress import Progress as Progress
from lanternpp.util.progress import progress_bar as progress_bar

NOISY = ("torchao", "torch.utils._pytree")  # transformers imports torchao where it is installed


def say(kind: str, message: object) -> None:
    """Print a message as one line on stderr."""
    print(f"lanternpp: {kind}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def tell_effect(effect: object | None) -> None:
    """Print one line on what weights in 8 bits do to the logits; nothing where they are not in 8 bits."""
    if effect is not None:
        say("int8", effect)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print warnings as one line each, equal ones once, and none of torchao's about kernels of other machines."""
    seen: set[str] = set()
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if str(message) not in seen:
            seen.add(str(message))
            say("warning", message)

    with warnings.catch_warnings():
        warnings.showwarning = show
        warnings.filterwarnings("ignore", "invalid escape sequence")  # torchao's own
        yield
