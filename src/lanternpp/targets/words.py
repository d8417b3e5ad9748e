"""The embedded default's family: a LlamaGen-shaped decoder (arXiv 2406.06525) with a prefix of words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import punctuation
from typing import Self
from unicodedata import category

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.jsonfile import read_text
from lanternpp.nn.configs import Codes, Grid, Heads, Hidden, Layers, Share, Slots, Width, Words, config_as
from lanternpp.nn.decoder import Decoder, DecoderConfig
from lanternpp.nn.packed import PackedLinear, packable
from lanternpp.nn.rope import grid_table
from lanternpp.nn.sources import SAME, Source, blank
from lanternpp.targets.base import Target, quoted, warn_of_prompt
from lanternpp.types import Prompt
from lanternpp.vq.folder import read_vq
from lanternpp.vq.model import VQ
from lanternpp.vq.reading import Reader

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
class WordsConfig:
    """The shape of a words target. `factored` tables are those of training: table + codebook @ basis."""

    words: Words
    subjects: Words
    dim: Width = 384
    layers: Layers = 14
    heads: Heads = 6
    hidden: Hidden = 1024
    grid: Grid = 16
    vocab: Codes = 4096
    code_dim: Width = 8
    slots: Slots = 8
    dropout: Share = 0.0
    factored: bool = False


class CodeTable(nn.Module):
    """One vector per code, [V, D]: free, or (in training) free + a linear map of the code's latent."""

    def __init__(self, vocab: int, dim: int, code_dim: int | None):
        super().__init__()
        self.table = nn.Parameter(nn.init.normal_(torch.empty(vocab, dim), std=0.02))
        self.basis = nn.Parameter(nn.init.normal_(torch.empty(code_dim, dim), std=0.1)) if code_dim else None
        self.packed: PackedLinear | None = None

    def matrix(self, codebook: Tensor) -> Tensor:
        """The vectors of all codes, [V, D]."""
        return self.table if self.basis is None else self.table + codebook.to(self.table.dtype) @ self.basis

    def pack(self) -> None:
        """Prepare `logits` for passes over few rows; only the plain table of inference can be packed."""
        if self.basis is None and packable(self.table):
            self.packed = PackedLinear(self.table, None)

    def logits(self, features: Tensor, codebook: Tensor) -> Tensor:
        """features [..., D] -> their products with all vectors, [..., V]."""
        if self.packed is not None:
            return self.packed(features)
        return nn.functional.linear(features, self.matrix(codebook))


class WordsTarget(Target):
    """Codes after a prefix of word slots; a learned null prefix for classifier-free guidance."""

    about = "folders written by lanternpp train"

    def __init__(self, config: WordsConfig, vq: VQ):
        super().__init__()
        self.config, self.vocab = config, config.vocab
        self.width, self.length = config.grid, config.grid**2
        shape = DecoderConfig(config.dim, config.layers, config.heads, config.hidden, dropout=config.dropout)
        rotary_table = grid_table(config.slots, config.grid, shape.head_dim)
        self.decoder = Decoder(shape, rotary_table.float())
        code_dim = config.code_dim if config.factored else None
        self.codes_in = CodeTable(config.vocab, config.dim, code_dim)
        self.codes_out = CodeTable(config.vocab, config.dim, code_dim)
        words = 1 + len(config.words)  # row 0: no word
        self.word_table = nn.Parameter(nn.init.normal_(torch.empty(words, config.dim), std=0.02))
        self.slot_table = nn.Parameter(nn.init.normal_(torch.empty(config.slots, config.dim), std=0.02))
        self.null_prefix = nn.Parameter(nn.init.normal_(torch.empty(config.slots, config.dim), std=0.02))
        self._vq = [vq]  # in a list: the tokenizer is not part of this module's weights
        self.synonyms: dict[str, str] = {}  # words read in the place of others

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """The target over the tokenizer in the folder beside it."""
        beside = source.path.parent / "tokenizer"
        vq = read_vq(beside, dtype)
        config = config_as(WordsConfig, source.config, source.path)
        with blank(source.path):
            target = cls(config, vq)
        source.fill(target, [SAME], dtype, device=device)
        target.synonyms = read_synonyms(source.path.parent / SYNONYMS)
        if (len(vq.codebook), vq.length) != (config.vocab, target.length):
            raise InputError(
                f"{source.path} has {config.vocab} codes on a grid of {config.grid}; "
                f"{beside} has {len(vq.codebook)} codes and {vq.length} per picture"
            )
        vq.to(device)
        return target.to(device)

    @property
    def vq(self) -> VQ:
        """The tokenizer that turns codes into pixels."""
        return self._vq[0]

    @property
    def codebook(self) -> Tensor:
        """[V, C] l2-normalised latents."""
        return self.vq.codebook

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

    def embed(self, codes: Tensor) -> Tensor:
        """codes [R, N] -> [R, N, D]."""
        return self.codes_in.matrix(self.codebook)[codes]

    def head(self, features: Tensor) -> Tensor:
        """features [..., D] -> logits [..., V]."""
        return self.codes_out.logits(features, self.codebook)

    @property
    def head_weights(self) -> tuple[Tensor, Tensor | None]:
        """Those of its output layer."""
        return self.codes_out.matrix(self.codebook), None

    def pack(self) -> None:
        """Prepare for passes over few rows."""
        super().pack()
        self.codes_out.pack()

    def pixels(self, codes: Tensor) -> Tensor:
        """codes [B, length] -> images [B, 3, H, W] in [-1, 1]."""
        return self.vq.decode(codes)

    def reader(self) -> Reader:
        """Its tokenizer reads pictures too."""
        return self.vq.reader()

    def folded(self) -> tuple[WordsConfig, dict[str, Tensor]]:
        """The same model with plain code tables: what is written to disk for inference."""
        tensors = {k: v for k, v in self.state_dict().items() if not k.endswith(".basis")}
        for name, table in (("codes_in", self.codes_in), ("codes_out", self.codes_out)):
            tensors[f"{name}.table"] = table.matrix(self.codebook).detach()
        return replace(self.config, factored=False, dropout=0.0), tensors
