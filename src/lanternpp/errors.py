"""The exceptions that a user's mistake raises, and their one-line messages."""

from __future__ import annotations

import pickle

MAX_MESSAGE_CHARS = 2000  # the maximum number of characters of a message


class InputError(ValueError):
    """A wrong prompt, option, file or checkpoint.

    The message is one sentence that names the wrong value and a right one. The command line prints
    the message on one line and exits with status 2; a server answers with a 4xx.
    """

    def __init__(self, message: object = ""):
        super().__init__(one_line(str(message)))


class ModelError(InputError):
    """A model that cannot draw in the form in which it was opened; a server answers with a 500."""


def reason(error: BaseException) -> str:
    """Return the first line of a library's error, and the second if the first ends with a colon, but no advice to let a file run code."""
    text = str(error).strip()
    advice = "weights_only" in text or "trust_remote_code" in text
    if advice or isinstance(error, pickle.UnpicklingError):
        return "a file of it is damaged, or would run code"
    first, *rest = text.splitlines() or [type(error).__name__]
    return " ".join((first, *(line.strip() for line in rest[: first.endswith(":")])))


def counted(count: object, noun: str) -> str:
    """Return a count, or a range of counts, with its noun."""
    return f"{count} {noun}{'' if str(count) == '1' else 's'}"


def one_line(text: str, most: int = MAX_MESSAGE_CHARS) -> str:
    """Return a text of unknown origin in a form that is safe to print: line breaks as spaces, control characters escaped.

    The middle of a text of more than `most` characters is left out.
    """
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    text = " ".join(text.splitlines()).replace("\t", " ")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
