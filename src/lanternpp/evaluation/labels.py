"""Which label a prompt asks for."""

from __future__ import annotations

import re
from collections.abc import Sequence


def label_of(prompt: str, labels: Sequence[str]) -> int | None:
    """The number of the label that the prompt names first, in the singular or plural; None where it names none.

    A label of several words must stand there whole; where two begin at the same word, the longer one counts.
    """
    said = words(prompt)
    wanted = sorted(enumerate(words(label) for label in labels), key=lambda pair: -len(pair[1]))
    for start in range(len(said)):
        for number, label in wanted:
            ahead = said[start : start + len(label)]
            if label and len(ahead) == len(label) and all(map(same, ahead, label)):
                return number
    return None


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return re.findall(r"[^\W_]+", text.lower())


def same(said: str, label: str) -> bool:
    """Whether a word is a label's word or its plural."""
    return label in (said, said.removesuffix("s"), said.removesuffix("es"))
