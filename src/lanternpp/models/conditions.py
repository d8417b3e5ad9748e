"""LlamaGen's two conditions (arXiv 2406.06525, section 2.2): one slot of a class, or 120 of a text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.classes import class_of
from lanternpp.models.text import T5Text
from lanternpp.types import Prompt


class Condition(nn.Module, ABC):
    """Encodes conditions as prompt slots."""

    text: T5Text | None = None  # where features of texts come from, for conditions that need them

    @abstractmethod
    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """b conditions (None: the null condition) -> [branches * b, T, D], conditional rows first."""

    @abstractmethod
    def check(self, condition: str | None) -> None:
        """InputError where a condition cannot be followed."""


class ClassCondition(Condition):
    """A row of a table; the last is the null class."""

    def __init__(self, dim: int, classes: int, slots: int = 1):
        super().__init__()
        self.classes = classes
        self.table = nn.Embedding(classes + 1, dim)

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """Classes by name or number; raises InputError for one that does not exist."""
        ids = [self.classes if c is None else class_of(c, self.classes) for c in conditions]
        ids += [self.classes] * (len(ids) * (branches - 1))
        at = self.table.weight.device
        return Prompt(
            self.table(torch.tensor(ids, device=at))[:, None], torch.zeros(len(ids), device=at).long()
        )

    def check(self, condition: str | None) -> None:
        """Whether the class exists."""
        if condition is not None:
            class_of(condition, self.classes)


class TextCondition(Condition):
    """The features of a text, projected, behind as much padding as the slots leave; a learned null prefix."""

    def __init__(self, dim: int, caption_dim: int, slots: int):
        super().__init__()
        self.slots, self.caption_dim = slots, caption_dim
        self.fc1 = nn.Linear(caption_dim, dim, bias=False)
        self.fc2 = nn.Linear(dim, dim, bias=False)
        self.null = nn.Parameter(torch.empty(slots, caption_dim))

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """Texts -> their slots. A null row is padded as its text is: so were the models trained to be guided."""
        rows, start = [], []
        for condition in conditions:
            features = self.null if condition is None else self._features(condition)
            start.append(self.slots - len(features))
            rows.append(F.pad(features, (0, 0, start[-1], 0)))
        given = torch.stack(rows)
        if branches == 2:
            given, start = torch.cat((given, self.null.expand_as(given))), start * 2
        embeds = self.fc2(F.gelu(self.fc1(given), approximate="tanh"))
        return Prompt(embeds, torch.tensor(start, device=embeds.device))

    def check(self, condition: str | None) -> None:
        """Whether the encoder reads the text; its features are kept for `prompt`."""
        if condition is not None:
            self._features(condition)

    def _features(self, text: str) -> Tensor:
        """[n, caption_dim] of a text; n at most the slots."""
        assert self.text is not None
        features = self.text.features(text, self.null)
        if features.dim() != 2 or features.shape[1] != self.caption_dim or not len(features):
            raise InputError(
                f"the text encoder gives features of shape {tuple(features.shape)}; this model reads "
                f"[1 to {self.slots}, {self.caption_dim}]: use the encoder it was trained with, google/flan-t5-xl"
            )
        return features[: self.slots]
