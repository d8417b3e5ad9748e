"""Targets that are language models, whose image codes are predicted like tokens after a prompt."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.models.tokens import STRIDE, Text, check_length, check_tokens, left_padded
from lanternpp.models.vq.reading import Reader
from lanternpp.nn import checkpoints
from lanternpp.nn.backend import backend
from lanternpp.nn.decoder import Decoder, DecoderConfig
from lanternpp.nn.llama import llama_rules
from lanternpp.nn.rope import line_table
from lanternpp.nn.sources import Rename, Source
from lanternpp.nn.stores import Store
from lanternpp.types import Prompt

SLOTS = 512  # the longest prompt, unless the model's own positions end before


@dataclass(frozen=True)
class Raster:
    """How an image's codes are laid out: rows of codes, each but the last perhaps followed by a row end."""

    rows: int
    columns: int
    ends: bool = False

    @property
    def width(self) -> int:
        """Codes from one place to the one below it."""
        return self.columns + self.ends

    @property
    def length(self) -> int:
        """Codes of an image, the row ends between its rows among them."""
        return self.rows * self.width - self.ends

    @classmethod
    def of(cls, size: str, patch: int, ends: bool, most: int, step: int = 1) -> Raster:
        """A size such as "768x512" in pixels (width first) or "768", of codes `patch` pixels wide.

        Raises InputError unless both sides are multiples of `step` codes and the image has at most `most`.
        """
        found = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", size if "x" in size else f"{size}x{size}")
        side = patch * step
        width, height = map(int, found.groups()) if found else (0, 0)
        if not (width and height) or width % side or height % side:
            raise InputError(
                f"size {size!r} cannot be drawn; give WIDTHxHEIGHT in multiples of {side} pixels"
            )
        raster = cls(height // patch, width // patch, ends)
        if raster.rows * raster.columns > most:
            raise InputError(
                f"size {size} has {raster.rows * raster.columns} codes and the model draws at most {most}"
            )
        return raster

    def lay(self, grid: Tensor, end: int) -> Tensor:
        """Codes of a grid [B, rows, columns] -> [B, length], the code `end` behind every row but the last."""
        if self.ends:
            grid = nn.functional.pad(grid, (0, 1), value=end)
        return grid.flatten(1)[:, : self.length]

    def grid(self, codes: Tensor) -> Tensor:
        """codes [B, length] -> [B, rows, columns] without the row ends."""
        full = nn.functional.pad(codes, (0, int(self.ends)))
        return full.unflatten(1, (self.rows, self.width))[..., : self.columns]


class LanguageTarget(Target):
    """A decoder over a line of positions, after a prompt of tokens.

    Codes are 0..V-1 and, where rows end with a code of their own, V is that code: it is drawn at the end of
    every row but the last and nowhere else.
    """

    kind: ClassVar[str]  # in a config of ours
    stride: ClassVar[int] = STRIDE  # prompts are padded to a multiple of it
    text: Text
    config: Any  # a dataclass
    _vq: list[Any]  # the VQ decoder; in a list: not among this module's weights

    def __init__(self, shape: DecoderConfig, rotary_table: Tensor, codes: int, raster: Raster, tokens: int):
        super().__init__()
        self.raster = raster
        self.codes, self.vocab = codes, codes + raster.ends
        self.width, self.length = raster.width, raster.length
        self.decoder = Decoder(shape, rotary_table)
        self.token_table = nn.Parameter(torch.empty(tokens, shape.dim))

    @classmethod
    def is_ours(cls, source: Source) -> bool:
        """Whether a checkpoint is one that `save` wrote."""
        return source.config.get("kind") == cls.kind

    @classmethod
    def beside(cls, source: Source) -> Path:
        """The folder with the other files of a checkpoint: its own, or the model folder that `save` wrote."""
        return source.path if source.path.is_dir() and not cls.is_ours(source) else source.path.parent

    @classmethod
    def text_of(cls, source: Source) -> Text:
        """The tokenizer of a checkpoint."""
        return Text(cls.beside(source) / ("text" if cls.is_ours(source) else ""))

    def save(self, folder: Path, store: Store) -> list[str]:
        """Write target, VQ decoder and the tokenizer of texts into a model folder."""
        config = {"kind": self.kind, **asdict(self.config)}
        checkpoints.save(folder / "target", config, self.state_dict(), store)
        self.save_vq(folder / "tokenizer", store)
        self.text.save(folder / "text")
        return ["target", "tokenizer", "text"]

    @abstractmethod
    def save_vq(self, folder: Path, store: Store) -> None:
        """Write the VQ decoder into a tokenizer folder."""

    @staticmethod
    def slots_within(positions: int, raster: Raster) -> int:
        """Prompt slots a model of so many positions has left beside the image; InputError where too few."""
        slots = min(SLOTS, positions - raster.length)
        if slots < 1:
            raise InputError(
                f"{raster.columns}x{raster.rows} codes do not fit the model's {positions} positions; "
                "choose a smaller size"
            )
        return slots

    @staticmethod
    def rotary_table(slots: int, raster: Raster, shape: DecoderConfig, base: float) -> Tensor:
        """The rotations of every slot, [slots + length, 2, d]."""
        return line_table(slots + raster.length, shape.head_dim, base).float()

    @property
    def slots(self) -> int:
        """The most prompt slots T."""
        return self.decoder.rotary_table.shape[0] - self.length

    @abstractmethod
    def conditional(self, text: str) -> list[int]:
        """The tokens of a prompt, up to where the first code is drawn."""

    @abstractmethod
    def unconditional(self, text: str | None) -> list[int]:
        """The tokens of the unconditional branch of guidance, for a prompt or None."""

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """Sentences -> [branches * b, T, D], padded on the left; InputError where one is too long."""
        rows = [self._tokens(condition) for condition in conditions]
        if branches == 2:
            rows += [self.unconditional(c) for c in conditions]
        check_tokens(max(map(max, rows)), len(self.token_table), self.text.path)
        ids, start = left_padded(rows, self.slots, self.token_table.device, self.stride)
        return Prompt(self.token_table[ids], start)

    def check(self, condition: str | None) -> None:
        """Its tokens alone."""
        check_tokens(max(self._tokens(condition)), len(self.token_table), self.text.path)

    def _tokens(self, condition: str | None) -> list[int]:
        """Those of a condition; InputError where they are too many."""
        row = self.unconditional(None) if condition is None else self.conditional(condition)
        check_length(row, self.slots, condition or "")
        return row

    def reader(self) -> Reader:
        """Its published tokenizer reads pictures too; square ones here."""
        raster, vq = self.raster, self._vq[0]
        if raster.rows != raster.columns:
            raise InputError(
                f"pictures of {raster.columns}x{raster.rows} codes cannot be read, square ones can: use --self."
            )
        return Reader.of(vq, raster.rows * vq.down, self.length, lambda grid: raster.lay(grid, self.codes))

    def constrain(self, logits: Tensor, index: Tensor) -> Tensor:
        """A row end at the end of a row, a code everywhere else."""
        if not self.raster.ends:
            return logits
        end = (index % self.width == self.width - 1)[..., None]
        row_end = torch.arange(self.vocab, device=logits.device) == self.codes
        return logits.masked_fill(end ^ row_end, float("-inf"))

    def with_row_end(self, codebook: Tensor) -> Tensor:
        """A codebook [codes, C] as [V, C]: the row end is placed far from all codes, so that it is no code's neighbour."""
        if not self.raster.ends:
            return codebook
        far = codebook.new_full((1, codebook.shape[1]), 10 * float(codebook.abs().max()) + 1)
        return torch.cat((codebook, far))

    def pack(self) -> None:
        """Prepare for passes over few rows: the decoder, and what is around it."""
        backend().pack(self)


def language_rules(prefix: str, shape: DecoderConfig, **more: Any) -> list[Rename]:
    """The names of a Llama below `prefix` (a regular expression), its head apart, as a `LanguageTarget`'s."""
    return [
        Rename(prefix + r"embed_tokens\.weight", "token_table"),
        Rename(prefix + r"norm\.weight", "decoder.norm.weight"),
        *llama_rules(shape, prefix + r"layers\.(\d+)", r"decoder.blocks.\1", **more),
    ]


class TokenTarget(LanguageTarget):
    """One vocabulary for tokens and codes: codes are embedded by its table, and its head is cut to them."""

    head_layer = "output"
    code_tokens: Tensor  # [V] the token of every code

    def __init__(
        self, shape: DecoderConfig, rotary_table: Tensor, code_tokens: Tensor, raster: Raster, tokens: int
    ):
        super().__init__(shape, rotary_table, len(code_tokens) - raster.ends, raster, tokens)
        if int(code_tokens.max()) >= tokens:
            raise ValueError(
                f"codes are tokens up to {int(code_tokens.max())} and the vocabulary has {tokens}"
            )
        self.output = nn.Linear(shape.dim, self.vocab, bias=False)
        self.register_buffer("code_tokens", code_tokens, persistent=False)

    @staticmethod
    def tokens_of(first: int, codes: int, row_end: int | None) -> Tensor:
        """The tokens of `codes` codes from `first` on, and of the row end; on the CPU, as `line_table`."""
        ends = [] if row_end is None else [row_end]
        return torch.tensor([*range(first, first + codes), *ends], device="cpu")

    def embed(self, codes: Tensor) -> Tensor:
        """codes [R, N] -> [R, N, D]."""
        return self.token_table[self.code_tokens[codes]]

    def head(self, features: Tensor) -> Tensor:
        """features [..., D] -> logits [..., V]."""
        return self.output(features)
