"""Which label a prompt asks for."""

from __future__ import annotations

import re
from collections.abc import Sequence


def label_of(prompt: str, labels: Sequence[str]) -> int | None:
    """The number of the label that the prompt names first, in the singular or plural; None where it names none.

    A label of several words must stand there whole; where two begin at the same word, the longer one counts.
    """
    prompt_words = words(prompt)
    by_length = sorted(enumerate(words(label) for label in labels), key=lambda pair: -len(pair[1]))
    for start in range(len(prompt_words)):
        for number, label in by_length:
            next_words = prompt_words[start : start + len(label)]
            if label and len(next_words) == len(label) and all(map(same, next_words, label)):
                return number
    return None


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return re.findall(r"[^\W_]+", text.lower())


def same(word: str, label: str) -> bool:
    """Whether a word is a label's word or its plural."""
    return label in (word, word.removesuffix("s"), word.removesuffix("es"))
