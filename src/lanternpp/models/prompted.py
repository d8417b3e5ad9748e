"""Decoders behind a prefix of words: the prompts that they read, whatever they draw."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import punctuation
from typing import Any, ClassVar, Self
from unicodedata import category

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.base import Target, quoted, warn_of_prompt
from lanternpp.models.vq.reading import Reader
from lanternpp.nn.configs import Grid, Heads, Hidden, Layers, Share, Slots, Width, Words, config_as
from lanternpp.nn.decoder import Decoder, DecoderConfig
from lanternpp.nn.rope import grid_table
from lanternpp.nn.sources import SAME, Source, blank
from lanternpp.types import Prompt
from lanternpp.util.jsonfile import read_text

SILENT = frozenset(["a", "an", "the", "of", "photo", "photograph", "picture", "image", "and", "with"])


SYNONYMS = "synonyms.txt"
LISTED = 12  # words that a warning lists


def split(sentence: str) -> list[str]:
    """The words of a sentence in lower case, and its pictograms, such as emoji."""
    parts = re.findall(r"[^\W_]+|[^\w\s]+", sentence.lower())
    kept = (part for part in parts if part[0].isalnum() or any(category(c) == "So" for c in part))
    return [part.strip(punctuation) for part in kept]


def listed(words: Sequence[str]) -> str:
    """Some words for a warning; of many the first, and how many more there are."""
    each = list(dict.fromkeys(word if len(word) <= 40 else f"{word[:39]}…" for word in words))
    more = f" and {len(each) - LISTED} more" if len(each) > LISTED else ""
    return ", ".join(each[:LISTED]) + more


def read_synonyms(path: Path) -> dict[str, str]:
    """Lines of "word: the model's word"; {} where there is no such file. InputError where it cannot be read."""
    if not path.is_file():
        return {}
    lines = read_text(path).splitlines()
    pairs = (line.partition(":") for line in lines if not line.startswith("#"))
    return {word.strip(): known.strip() for word, _, known in pairs if known}


@dataclass(frozen=True)
class PromptedConfig:
    """The shape of a decoder behind a prefix of words."""

    words: Words
    subjects: Words
    dim: Width = 384
    layers: Layers = 14
    heads: Heads = 6
    hidden: Hidden = 1024
    grid: Grid = 16
    slots: Slots = 8
    dropout: Share = 0.0


class PromptedTarget(Target):
    """A decoder behind a prefix of word slots; a learned null prefix for classifier-free guidance."""

    about = "folders written by lanternpp train"
    config_class: ClassVar[type[PromptedConfig]]

    def __init__(self, config: PromptedConfig, tokenizer: nn.Module):
        super().__init__()
        self.config = config
        self.width, self.length = config.grid, config.grid**2
        shape = DecoderConfig(config.dim, config.layers, config.heads, config.hidden, dropout=config.dropout)
        rotary_table = grid_table(config.slots, config.grid, shape.head_dim)
        self.decoder = Decoder(shape, rotary_table.float())
        self.add_tables()
        words = 1 + len(config.words)  # row 0: no word
        self.word_table = nn.Parameter(nn.init.normal_(torch.empty(words, config.dim), std=0.02))
        self.slot_table = nn.Parameter(nn.init.normal_(torch.empty(config.slots, config.dim), std=0.02))
        self.null_prefix = nn.Parameter(nn.init.normal_(torch.empty(config.slots, config.dim), std=0.02))
        self._vq: list[Any] = [tokenizer]  # in a list: the tokenizer is not part of this module's weights
        self.synonyms: dict[str, str] = {}  # words read in the place of others

    @staticmethod
    @abstractmethod
    def tokenizer(folder: Path, dtype: torch.dtype) -> Any:
        """The tokenizer in the folder beside the target."""

    @abstractmethod
    def add_tables(self) -> None:
        """Make what `embed` and `head` read."""

    @abstractmethod
    def folded(self) -> tuple[Any, dict[str, Tensor]]:
        """Config and tensors as they are written to disk for inference."""

    @abstractmethod
    def misfit(self) -> tuple[str, str] | None:
        """What the config says and what the tokenizer has instead; None where they are the same."""

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """The target over the tokenizer in the folder beside it."""
        beside = source.path.parent / "tokenizer"
        tokenizer = cls.tokenizer(beside, dtype)
        config = config_as(cls.config_class, source.config, source.path)
        with blank(source.path):
            target = cls(config, tokenizer)
        source.fill(target, [SAME], dtype, device=device)
        target.synonyms = read_synonyms(source.path.parent / SYNONYMS)
        if wrong := target.misfit():
            raise InputError(f"{source.path} has {wrong[0]}; {beside} has {wrong[1]}")
        tokenizer.to(device)
        return target.to(device)

    @property
    def vq(self) -> Any:
        """The tokenizer that turns codes, or latents, into pixels."""
        return self._vq[0]

    def pixels(self, codes: Tensor) -> Tensor:
        """codes [B, length] -> images [B, 3, H, W] in [-1, 1]."""
        images: Tensor = self.vq.decode(codes)
        return images

    def reader(self) -> Reader:
        """Its tokenizer reads pictures too."""
        reader: Reader = self.vq.reader()
        return reader

    @property
    def slots(self) -> int:
        """Word slots T of every prompt."""
        return self.config.slots

    @property
    def words(self) -> Mapping[str, Sequence[str]]:
        """Subjects, of which a prompt needs one, and what may stand beside them."""
        subjects = self.config.subjects
        return {"subjects": subjects, "beside them": [w for w in self.config.words if w not in subjects]}

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """Sentences -> [branches * b, T, D]; raises InputError where no subject is named."""
        ids = torch.tensor(self._ids(conditions), device=self.word_table.device)
        null = torch.tensor([c is None for c in conditions], device=ids.device)
        embeds = self.prefix(ids, null)
        if branches == 2:
            embeds = torch.cat((embeds, self.prefix(ids, torch.ones_like(null))))
        return Prompt(embeds, torch.zeros(embeds.shape[0], dtype=torch.int64, device=ids.device))

    def check(self, condition: str | None) -> None:
        """Its words alone."""
        self._ids([condition])

    def _ids(self, conditions: Sequence[str | None]) -> list[list[int]]:
        """`word_ids` of each. Called from one place, so that Python shows the same warning once."""
        return [self.word_ids(c) for c in conditions]

    def prefix(self, ids: Tensor, null: Tensor) -> Tensor:
        """Word ids [b, T] -> [b, T, D]; rows where null [b] is True get the null prefix."""
        words = self.word_table[ids] + self.slot_table
        return torch.where(null[:, None, None], self.null_prefix, words)

    def word_ids(self, sentence: str | None) -> list[int]:
        """A sentence -> T ids into the word table (0: no word). Warns of words the model never saw."""
        if sentence is None:
            return [0] * self.slots
        ids, unknown, replaced, subject = [], [], [], False
        for word in split(sentence):
            if word in SILENT:
                continue
            known = self.known(word)
            if known is None:
                unknown.append(word)
                continue
            if not word.startswith(known):
                replaced.append(f"{word} as {known}")
            ids.append(self.config.words.index(known) + 1)
            subject = subject or known in self.config.subjects
        if not subject:
            raise InputError(
                f"prompt {quoted(sentence)} names no subject this model knows; use one of: {', '.join(self.config.subjects)}"
            )
        if replaced:
            warn_of_prompt(f"this model reads {listed(replaced)}")
        if unknown:
            warn_of_prompt(
                f"words this model does not know are ignored: {listed(unknown)}; "
                f"it knows: {', '.join(self.config.words)}"
            )
        if len(ids) > self.slots:
            raise InputError(
                f"prompt {quoted(sentence)} has {len(ids)} known words; this model takes at most {self.slots}"
            )
        return ids + [0] * (self.slots - len(ids))

    def known(self, word: str) -> str | None:
        """The word of the model's own that a word is read as: itself, its singular or a synonym."""
        forms = (word, word.removesuffix("s"), word.removesuffix("es"))
        every = (*forms, *(self.synonyms.get(form) for form in forms))
        return next((form for form in every if form in self.config.words), None)
