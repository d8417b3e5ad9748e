"""Prompts of language models: token ids from a checkpoint's own tokenizer, padded on the left."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.util.files import replacing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
STRIDE = 32  # prompts are padded to a multiple of this, so that few shapes are compiled


class Text:
    """The tokenizer.json of a checkpoint folder, read when it is first used."""

    def __init__(self, folder: Path):
        self.path = folder / TOKENIZER

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        if not self.path.is_file():
            raise InputError(f"{self.path} is missing: copy it there from the model's repository.")
        try:
            return Tokenizer.from_file(str(self.path))
        except Exception as error:  # the library raises no narrower one
            reason = str(error).splitlines()[0]
            raise InputError(f"{self.path} is no tokenizer ({reason}): fetch it again.") from None

    def save(self, folder: Path) -> None:
        """Copy it into another folder."""
        with replacing(folder / TOKENIZER) as temporary:
            shutil.copyfile(self.path, temporary)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, none added before or after it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def find(self, token: str) -> int | None:
        """The id of one token by its name; None where there is none."""
        return self._tokenizer.token_to_id(token)

    def id(self, token: str) -> int:
        """The same, of a token that must be there."""
        found = self.find(token)
        if found is None:
            raise InputError(f"{self.path} has no token {token!r}: it is another model's tokenizer.")
        return found


def first_code(text: Text, name: str, last: str, codes: int, what: str) -> int:
    """The id of code 0, whose token is `name`; code V - 1 must lie V - 1 further on, at the token `last`.

    Raises InputError; `what`: how the message describes a model without them.
    """
    first, end = text.find(name), text.find(last)
    if first is None or end is None:
        raise InputError(f"{text.path} has no tokens for {codes} image codes ({name} to {last}): {what}")
    if end - first != codes - 1:
        raise InputError(
            f"{text.path}: {name} to {last} are {end - first + 1} ids where {codes} are expected"
        )
    return first


def left_padded(
    rows: Sequence[Sequence[int]], slots: int, device: torch.device, stride: int = STRIDE
) -> tuple[Tensor, Tensor]:
    """Token ids as ([R, T], start [R]), T a multiple of `stride` or `slots`; padding is token 0, never seen."""
    longest = max(map(len, rows))
    width = min(-(-longest // stride) * stride, slots)
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    return ids, torch.tensor([width - len(row) for row in rows], device=device)


def check_tokens(highest: int, tokens: int, path: Path) -> None:
    """InputError where a tokenizer has a token that its model does not know."""
    if highest >= tokens:
        raise InputError(
            f"{path} has token {highest} and its model knows {tokens}: it is another model's tokenizer."
        )


def check_length(ids: Sequence[int], slots: int, prompt: str) -> None:
    """InputError where a prompt takes more than the slots there are."""
    if len(ids) > slots:
        shown = prompt if len(prompt) <= 40 else prompt[:37] + "..."
        raise InputError(f"prompt {shown!r} takes {len(ids)} slots and there are {slots}; shorten it")
