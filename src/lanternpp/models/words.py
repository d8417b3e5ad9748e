"""Decoders after a prefix of words; the shipped default's family, in the shape of LlamaGen (arXiv 2406.06525), over codes."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import punctuation
from typing import ClassVar, Self
from unicodedata import category

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.base import Target, quoted, warn_of_prompt
from lanternpp.models.vq.autoencoder import VQ, Autoencoder, read_tokenizer
from lanternpp.models.vq.codes import Reader
from lanternpp.nn.checkpoints import Codes, Grid, Heads, Hidden, Layers, Share, Slots, Width, Words, config_as
from lanternpp.nn.decoder import Decoder, DecoderConfig, grid_table
from lanternpp.nn.sources import SAME, Rename, Source, blank
from lanternpp.types import Prompt
from lanternpp.util.jsonfile import read_text

IGNORED_WORDS = frozenset(["a", "an", "the", "of", "photo", "photograph", "picture", "image", "and", "with"])
SYNONYMS = "synonyms.txt"
MAX_LISTED_WORDS = 12  # in a warning
OLD_TABLES = Rename(r"(codes_in|codes_out)\.table", r"\1.weight")  # names in the files of earlier versions


def split(sentence: str) -> list[str]:
    """Return the words of a sentence in lower case, and its pictograms, such as emoji."""
    tokens = re.findall(r"[^\W_]+|[^\w\s]+", sentence.lower())
    words = (token for token in tokens if token[0].isalnum() or any(category(c) == "So" for c in token))
    return [word.strip(punctuation) for word in words]


def listed(words: Sequence[str]) -> str:
    """Return the first distinct words as a list for a warning, with the number of further words."""
    distinct = list(dict.fromkeys(word if len(word) <= 40 else f"{word[:39]}…" for word in words))
    suffix = f" and {len(distinct) - MAX_LISTED_WORDS} more" if len(distinct) > MAX_LISTED_WORDS else ""
    return ", ".join(distinct[:MAX_LISTED_WORDS]) + suffix


@dataclass(frozen=True)
class PromptedConfig:
    """The shape of a decoder after a prefix of words."""

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
    """A decoder after a prefix of word slots; a learned null prefix for classifier-free guidance."""

    about = "folders written by recipes/nature/target.py"
    config_class: ClassVar[type[PromptedConfig]]
    tokenizer_class: ClassVar[type[Autoencoder]]

    def __init__(self, config: PromptedConfig, tokenizer: nn.Module):
        super().__init__()
        self.config = config
        vars(self)["vq"] = tokenizer  # not a submodule: a tokenizer has its own folder
        self.width, self.length, self.slots = config.grid, config.grid**2, config.slots
        shape = DecoderConfig(config.dim, config.layers, config.heads, config.hidden, dropout=config.dropout)
        rotary_table = grid_table(config.slots, config.grid, shape.head_dim)
        self.decoder = Decoder(shape, rotary_table.float())
        self.add_tables()

        def table(rows: int) -> nn.Parameter:
            return nn.Parameter(nn.init.normal_(torch.empty(rows, config.dim), std=0.02))

        self.word_table = table(1 + len(config.words))  # row 0: no word
        self.slot_table, self.null_prefix = table(config.slots), table(config.slots)
        self.synonyms: dict[str, str] = {}  # word -> the model's word that replaces it

    @abstractmethod
    def add_tables(self) -> None:
        """Make the layers of `embed` and `head`."""

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """Read the target, with the tokenizer and the synonyms in the folder that contains that of `source`."""
        tokenizer_folder, synonyms = (source.folder.parent / name for name in ("tokenizer", SYNONYMS))
        tokenizer = read_tokenizer(tokenizer_folder, dtype, kind=cls.tokenizer_class)
        config = config_as(cls.config_class, source.config, source.path)
        with blank(source.path):
            target = cls(config, tokenizer)
        source.fill(target, [SAME, OLD_TABLES], dtype, device=device)
        if synonyms.is_file():
            lines = (line for line in read_text(synonyms).splitlines() if not line.startswith("#"))
            pairs = (line.partition(":") for line in lines)
            target.synonyms = {word.strip(): synonym.strip() for word, _, synonym in pairs if synonym}
        sizes, tokenizer_sizes = ((x.vocab or x.channels, x.length) for x in (target, tokenizer))
        if sizes != tokenizer_sizes:
            unit = "codes" if target.vocab else "channels"
            raise InputError(
                f"{source.path} has {sizes[0]} {unit} and {sizes[1]} places; "
                f"{tokenizer_folder} has {tokenizer_sizes[0]} {unit} and {tokenizer_sizes[1]} places"
            )
        tokenizer.to(device)
        return target.to(device)

    def reader(self) -> Reader:
        """Return the reader of the tokenizer."""
        return self.vq.reader()

    @property
    def words(self) -> Mapping[str, Sequence[str]]:
        """The subjects (a prompt needs at least one), and the other words."""
        subjects = self.config.subjects
        return {"subjects": subjects, "beside them": [w for w in self.config.words if w not in subjects]}

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """Embed b sentences as [branches * b, T, D]; raise InputError if a sentence names no subject."""
        ids = torch.tensor([self.word_ids(c) for c in conditions], device=self.word_table.device)
        null = torch.tensor([c is None for c in conditions], device=ids.device)
        embeds = self.prefix(ids, null)
        if branches == 2:
            embeds = torch.cat((embeds, self.prefix(ids, torch.ones_like(null))))
        return Prompt(embeds, torch.zeros(embeds.shape[0], dtype=torch.int64, device=ids.device))

    def prefix(self, ids: Tensor, null: Tensor) -> Tensor:
        """Embed word ids [b, T] as [b, T, D]; rows with True in null [b] get the null prefix."""
        return torch.where(null[:, None, None], self.null_prefix, self.word_table[ids] + self.slot_table)

    def word_ids(self, sentence: str | None) -> list[int]:
        """Return the T ids of a sentence in the word table (0: no word). Warn of replaced and unknown words."""
        if sentence is None:
            return [0] * self.slots
        pairs = [(word, self.known_word(word)) for word in split(sentence) if word not in IGNORED_WORDS]
        ids = [self.config.words.index(match) + 1 for _, match in pairs if match]
        if not any(match in self.config.subjects for _, match in pairs):
            raise InputError(
                f"prompt {quoted(sentence)} names no subject this model knows; use one of: {', '.join(self.config.subjects)}"
            )
        replaced = [f"{word} as {match}" for word, match in pairs if match and not word.startswith(match)]
        if replaced:
            warn_of_prompt(f"this model reads {listed(replaced)}")
        if unknown := [word for word, match in pairs if not match]:
            warn_of_prompt(
                f"words this model does not know are ignored: {listed(unknown)}; "
                f"it knows: {', '.join(self.config.words)}"
            )
        if len(ids) > self.slots:
            raise InputError(
                f"prompt {quoted(sentence)} has {len(ids)} known words; this model takes at most {self.slots}"
            )
        return ids + [0] * (self.slots - len(ids))

    def known_word(self, word: str) -> str | None:
        """Return the model's word for a word: the word itself, its singular or a synonym; None if there is none."""
        forms = (word, word.removesuffix("s"), word.removesuffix("es"))
        synonyms = (self.synonyms.get(form) for form in forms)
        return next((form for form in (*forms, *synonyms) if form in self.config.words), None)


@dataclass(frozen=True)
class WordsConfig(PromptedConfig):
    """The shape of a words target."""

    vocab: Codes = 4096


class WordsTarget(PromptedTarget):
    """Codes after a prefix of word slots."""

    config_class = WordsConfig
    tokenizer_class = VQ
    config: WordsConfig

    def __init__(self, config: WordsConfig, vq: VQ):
        super().__init__(config, vq)
        self.vocab = config.vocab

    def add_tables(self) -> None:
        """Make a table of codes for the input and one for the output."""
        vocab, dim = self.config.vocab, self.config.dim
        self.codes_in = nn.Embedding(vocab, dim, device="meta")
        self.codes_out = nn.Linear(dim, vocab, bias=False, device="meta")
        for layer in (self.codes_in, self.codes_out):
            layer.weight = nn.Parameter(nn.init.normal_(torch.empty(vocab, dim), std=0.02))
