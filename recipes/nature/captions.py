"""The words of captions: a target's vocabulary, and captions as ids of words."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.models.words import SILENT, PromptedTarget
from lanternpp.training.codes import Codes, Split


def one_per_subject(prompts: list[str], subjects: tuple[str, ...], most: int) -> list[str]:
    """The first prompt of each subject, `most` of them."""
    first: dict[str, str] = {}
    for prompt in prompts:
        named = [word for word in split_words(prompt) if word in subjects]
        if named:
            first.setdefault(named[0], prompt)
    return list(first.values())[:most]


def split_words(text: str) -> list[str]:
    """The words of a caption, in lower case, without those that carry no meaning (`SILENT`)."""
    return [word for word in re.findall(r"[^\W_]+", text.lower()) if word not in SILENT]


def word_ids(model: PromptedTarget, split: Split) -> Tensor:
    """The captions of a split as ids [M, T]; a caption without meaningful words is the null caption."""
    ids = {text: model.word_ids(text if split_words(text) else None) for text in set(split.texts)}
    return torch.tensor([ids[text] for text in split.texts])


def vocabulary(codes: Codes, slots: int) -> dict[str, Any]:
    """Words, subjects and slots of the captions.

    Subjects are the words of the labels; where labels are missing, or some caption names none of them,
    any word will do as a subject.
    """
    texts = [*codes.train.texts, *codes.val.texts]
    caption_words = [split_words(text) for text in texts]
    counts = Counter(word for words in caption_words for word in words)
    if not counts:
        raise InputError("no caption says anything: their words are all of " + ", ".join(sorted(SILENT)))
    words = sorted(counts, key=lambda word: (-counts[word], word))
    labels = {word for label in codes.train.labels for word in split_words(label)} & counts.keys()
    all_named = all(not words_of or labels.intersection(words_of) for words_of in caption_words)
    subjects = sorted(labels) if labels and all_named else words
    return {
        "words": tuple(words),
        "subjects": tuple(subjects),
        "slots": max(slots, max(len(words_of) for words_of in caption_words)),
    }
