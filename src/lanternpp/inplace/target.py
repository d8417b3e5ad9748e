"""A `Target` on the modules of a model that is loaded in transformers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.inplace.decoder import TransformersDecoder
from lanternpp.inplace.format import Format
from lanternpp.models.base import Target
from lanternpp.models.tokens import STRIDE, left_padded
from lanternpp.nn import llama
from lanternpp.nn.rope import line_table
from lanternpp.types import Prompt

MOST = 1 << 15  # positions of the rotary table that drafters get


class InPlaceTarget(Target):
    """A model's decoder layers, embeddings and head, as they lie in memory, and one call's prompts and format.

    tokens: embeds tokens; its weight's dtype and device are those of the KV cache. codes: the token of every code, in the
    order of the image tokenizer. extras: further tokens that the models' pictures usually have, such as a row end.
    """

    decoder: TransformersDecoder
    without_pixels = "pixels are made by the transformers model, from the tokens that generate returns"

    def __init__(
        self,
        body: nn.Module,
        tokens: nn.Module,
        codes: Sequence[int],
        extras: Sequence[int] = (),
        qk_norm: bool = False,
        positions: Callable[[Tensor], Tensor] = lambda position: position,
    ):
        super().__init__()
        where, config = Path(type(body).__name__), body.config.to_dict()  # type: ignore[operator, union-attr]
        given = llama.fields(config, where)
        shape, self.most = given.decoder(where, qk_norm=qk_norm), given.max_position_embeddings
        table = line_table(min(self.most, MOST), shape.head_dim, given.rope_base(where)).float()
        self.tokens = tokens  # first: `next(parameters())` is of it
        self.decoder = TransformersDecoder(body, shape, table.to(self.device), positions)
        self.codes = tuple(codes)
        self.prompts: Sequence[Prompt] = ()
        self._slots, self.length = 0, 0
        self.arrange(Format.plain(1), 0, (), extras)

    @property
    def device(self) -> torch.device:
        """Where its embeddings are."""
        return next(self.tokens.parameters()).device

    def arrange(
        self, format: Format, slots: int, prompts: Sequence[Prompt], extras: Sequence[int] | None = None
    ) -> bool:
        """Set what is drawn from now on; whether engines made before are of other sizes.

        prompts: those that conditions name, by their number. slots: the most slots of one.
        """
        ids = (*self.codes, *(format.extras if extras is None else extras))
        before = (self._slots, self.length, getattr(self, "width", 0), getattr(self, "ids", ()))
        self.prompts, self._slots, self.ids = prompts, slots, ids
        self.length, self.width, self.vocab = format.length, format.width, len(ids)
        self._code_ids = torch.tensor(ids, device=self.device)
        self._allowed = self._kinds = None
        if format.kinds:
            sets = [sorted(tokens) for tokens in format.sets]
            rows = [torch.isin(self._code_ids, torch.tensor(s, device=self.device)) for s in sets]
            self._allowed = torch.stack(rows)  # [kinds, V]
            self._kinds = torch.tensor(format.kinds, device=self.device)
        return before != (slots, self.length, self.width, ids)

    @property
    def slots(self) -> int:
        """The most prompt slots T."""
        return self._slots

    def token_ids(self, codes: Tensor) -> Tensor:
        """The tokens of codes, of any shape."""
        return self._code_ids[codes]

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """The prompt of this call that one condition names by its number; the caller made it for these branches."""
        (condition,) = conditions
        return self.prompts[int(condition or 0)]

    def encode(self, rows: Sequence[Sequence[int]], branches: int) -> tuple[list[Prompt], int]:
        """Rows of tokens, all conditional ones first, as a prompt per sample, all padded to the same number of slots."""
        longest = max(map(len, rows))
        ids, start = left_padded(rows, -(-longest // STRIDE) * STRIDE, self.device)
        count = len(rows) // branches
        picks = [torch.arange(branches, device=self.device) * count + sample for sample in range(count)]
        return [Prompt(self.tokens(ids[pick]), start[pick]) for pick in picks], ids.shape[1]

    def constrain(self, logits: Tensor, index: Tensor) -> Tensor:
        """-inf at codes that this call's format forbids at places `index` [B, N]."""
        if self._allowed is None or self._kinds is None:
            return logits
        return logits.masked_fill(~self._allowed[self._kinds[index]], float("-inf"))

    def embed(self, codes: Tensor) -> Tensor:
        """codes [R, N] -> [R, N, D], as tokens are embedded."""
        embedded: Tensor = self.tokens(self.token_ids(codes))
        return embedded

    def pixels(self, codes: Tensor) -> Tensor:
        """InputError: the model's own methods make pixels of tokens."""
        raise InputError(self.without_pixels)

    @property
    @abstractmethod
    def latents(self) -> Tensor:
        """[codes, C] the latent vector of every code of the image."""

    @property
    def codebook(self) -> Tensor:
        """[V, C] latents; the tokens that are no codes are placed far from all others, and from each other."""
        latents = self.latents.detach()
        extras = self.vocab - len(latents)
        far = 10 * float(latents.abs().max()) + 1
        scale = torch.arange(1, extras + 1, device=latents.device, dtype=latents.dtype)[:, None] * far
        return torch.cat((latents, scale.expand(-1, latents.shape[1])))


class TokenHead:
    """The head of a model with one vocabulary for words and codes, cut to the codes."""

    def __init__(self, head: nn.Module):
        self._head = head

    def __call__(self, features: Tensor, ids: Tensor) -> Tensor:
        """features [..., D], ids [V] -> logits [..., V]; a plain linear layer computes only what lies between the ids."""
        head = self._head
        if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:  # adapted or quantised
            logits: Tensor = head(features)
            return logits[..., ids]
        low, high = int(ids.min()), int(ids.max()) + 1
        bias = None if head.bias is None else head.bias[low:high]
        logits = nn.functional.linear(features, head.weight[low:high], bias)
        return logits[..., ids - low]


def token_rows(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """The tokens of prompts [B, T] without their padding, which must be on the left. InputError."""
    if mask is None:
        return [row.tolist() for row in ids]
    seen = mask.to(torch.bool)
    if mask.shape != ids.shape or bool((seen[:, :-1] & ~seen[:, 1:]).any()) or not bool(seen[:, -1].all()):
        raise InputError("the attention mask must be [batch, tokens] and prompts padded on the left alone")
    return [row[kept].tolist() for row, kept in zip(ids, seen.to(ids.device), strict=True)]


def refused(names: Sequence[str], given: Any) -> None:
    """InputError where one of these arguments of `generate` has a value."""
    for name in names:
        value = given.get(name)
        if value is not None and value is not False and not (hasattr(value, "__len__") and not len(value)):
            raise InputError(
                f"{name} is not supported with drafts; leave it out, or use lanternpp.restore(model)"
            )
