"""The exceptions that a user's mistake raises."""

from __future__ import annotations

import pickle

MOST = 2000  # characters of a sentence


class InputError(ValueError):
    """A wrong prompt, option, file or checkpoint.

    The message is one sentence that names the value and what would be right. The command line
    prints it on one line and exits with status 2; a server answers with a 4xx.
    """

    def __init__(self, message: object = ""):
        super().__init__(one_line(str(message)))


class ModelError(InputError):
    """A model that cannot be drawn with as it was opened; a server answers with a 500."""


def reason(error: BaseException) -> str:
    """The first line of a library's error, and the second after a colon; advice to let a file run code is not repeated."""
    text = str(error).strip()
    advice = "weights_only" in text or "trust_remote_code" in text
    if advice or isinstance(error, pickle.UnpicklingError):
        return "a file of it is damaged, or would run code"
    first, *rest = text.splitlines() or [type(error).__name__]
    return " ".join((first, *(line.strip() for line in rest[: first.endswith(":")])))


def one_line(text: str, most: int = MOST) -> str:
    """Text that may quote what strangers wrote, safe to print: line breaks are spaces and control characters are escaped.

    Of text longer than `most` characters the middle is left out.
    """
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    text = " ".join(text.splitlines()).replace("\t", " ")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
