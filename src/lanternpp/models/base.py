"""The base class of targets: decoders over image codes 0..V-1."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.vq.codes import Reader
from lanternpp.nn.backend import HeadLogits, backend
from lanternpp.nn.checkpoints import Store
from lanternpp.nn.decoder import AttentionCache, Decoder
from lanternpp.nn.sources import Source
from lanternpp.types import Depicted, Nodes, Prompt


def quoted(prompt: str, most: int = 80) -> str:
    """A prompt in quotes, for a message; of a long one its beginning."""
    return repr(prompt if len(prompt) <= most else f"{prompt[: most - 1]}…")


class PromptWarning(UserWarning):
    """A part of the prompt that the model cannot follow."""


_collected: ContextVar[list[str] | None] = ContextVar("prompt_warnings", default=None)


@contextmanager
def prompt_warnings() -> Iterator[list[str]]:
    """Collects the warnings of prompts that are read in this block, in place of Python's; other threads keep theirs."""
    found: list[str] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def warn_of_prompt(sentence: str) -> None:
    """For targets: a PromptWarning, or one more sentence for the block that collects them."""
    found = _collected.get()
    if found is None:
        warnings.warn(sentence, PromptWarning, stacklevel=3)
    else:
        found.append(sentence)


def check_codes(target: Path, target_codes: int, tokenizer: Path, tokenizer_codes: int) -> None:
    """InputError unless a tokenizer has as many codes as its target."""
    if target_codes != tokenizer_codes:
        raise InputError(
            f"{target} has {target_codes} codes and the tokenizer {tokenizer} has {tokenizer_codes}; use the tokenizer "
            "that it was trained with"
        )


class Target(nn.Module, ABC):
    """The autoregressive model whose distribution is decoded. Codes are 0..V-1; a family maps them to its vocabulary.

    A family with the table `codes_in`, the linear layer `codes_out` and the tokenizer `vq` inherits `embed`, `head`, `codebook` and
    `pixels`.
    """

    vocab: int  # V; 0 of latents
    channels: int = 0  # C, numbers of a continuous latent; 0: pictures are of codes
    length: int  # codes of an image, in raster order
    width: int  # codes of one image row
    slots: int  # the most prompt slots T that a condition takes
    decoder: Decoder
    codes_in: nn.Embedding
    codes_out: nn.Linear
    vq: Any = None  # the tokenizer, which turns codes or latents into pixels; not a part of this module
    native_head: HeadLogits | None = None  # set where it is read for inference
    engine: ClassVar[str] = "lanternpp.engine.decode:Engine"  # the class that decodes it
    any_size: ClassVar[bool] = False  # whether `read` heeds a size in pixels that the user gives
    head_layer: ClassVar[str | None] = None  # the attribute that is the linear layer of `head`, if one is
    about: ClassVar[str] = ""  # the checkpoints it reads, for the message about an unknown one
    defaults: Mapping[str, Any] = {}  # recommended settings, for models without a defaults.json
    without_pixels: ClassVar[str] = ""  # where its codes cannot become pixels here: what to do, for a message

    @classmethod
    def claims(cls, source: Source) -> bool:
        """Whether a checkpoint without our own `kind` is this family's, by its config, its names and shapes."""
        return False

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """The target in `source`, ready to draw; tokenizers and encoders are found around `source.path`.

        Raises InputError where something is missing or does not fit.
        """
        raise NotImplementedError

    def save(self, folder: Path, store: Store) -> list[str]:
        """Write it into a model folder of ours, its tokenizer too; the parts written. InputError if it cannot be."""
        raise InputError(f"a {type(self).__name__} cannot be converted; use its checkpoint as it is")

    @property
    def codebook(self) -> Tensor | None:
        """[V, C] the latent vector of every code, l2-normalised by most tokenizers; None where there is no table."""
        return getattr(self.vq, "codebook", None)

    @abstractmethod
    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """b conditions (None: the null condition) as [branches * b, T, D], conditional rows first."""

    def check(self, condition: str | None) -> None:
        """Check a condition: the InputError or warnings that `prompt` gives."""
        self.prompt([condition], 1)

    def embed(self, codes: Tensor) -> Tensor:
        """codes [R, N] -> [R, N, D]."""
        return self.codes_in(codes)

    def examples(self, count: int) -> Tensor:
        """Some codes, at most `count`, evenly over all: [n]. A drafter's file tells its target by their embeddings."""
        device, count = self.decoder.rotary_table.device, min(self.vocab, count)
        return torch.linspace(0, self.vocab - 1, count, dtype=torch.float32, device=device).long()

    def head(self, features: Tensor) -> Tensor:
        """features [..., D] -> logits [..., V]."""
        return self.codes_out(features)

    @property
    def head_linear(self) -> nn.Module | None:
        """The linear layer that `head` is, with weight [V, D] and bias; None where it is another function."""
        return None if self.head_layer is None else self.get_submodule(self.head_layer)

    def pixels(self, codes: Tensor) -> Tensor:
        """codes [B, length] -> images [B, 3, H, W] in [-1, 1]."""
        return self.vq.decode(codes)

    @property
    def conditions(self) -> Sequence[str]:
        """Every condition that it knows; empty where they cannot be listed."""
        return ()

    @property
    def words(self) -> Mapping[str, Sequence[str]]:
        """The words that prompts may use, a list for each kind of word; empty where they cannot be listed."""
        return {}

    def depicted(self, prompt: str, pictures: Sequence[Any], own_shape: bool = True) -> Depicted:
        """A prompt that shows pictures (PIL images, RGB) beside its text; `shaped` gives the target that draws it.

        own_shape: whether it is drawn in the shape of the last picture, if `read` was given no size. InputError where the family
        reads no pictures.
        """
        raise InputError(f"a {type(self).__name__} draws from text alone: leave out image")

    def shaped(self, shape: Hashable) -> Target:
        """The target that draws prompts of a shape (`Depicted.shape`): itself for None, else another of the same weights."""
        return self

    def cache_prompts(self, prompts: int) -> None:
        """Keep the encoded features of up to so many more prompts, which will be used repeatedly."""
        return

    def release_encoder(self) -> None:
        """Free the text encoder, where there is one; the next new prompt loads it again."""
        return

    def reader(self) -> Reader:
        """The encoder of its tokenizer, pictures to codes. InputError where it has none."""
        raise InputError(
            f"the tokenizer of this {type(self).__name__} only draws: use --self instead of --data."
        )

    def from_cache(self, found: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Cached codes or moments of pictures [B, length, ...] -> codes as `embed` reads them; latents are drawn.

        generator: of the CPU; None: the global one.
        """
        return found

    def constrain(self, logits: Tensor, index: Tensor) -> Tensor:
        """Logits [B, N, V] of the codes at places `index` [B, N] -> the same, -inf at codes that the format forbids there."""
        return logits

    def forward(
        self, x: Tensor, nodes: Nodes, cache: AttentionCache, aux_layers: tuple[int, ...] = ()
    ) -> Tensor:
        """x [R, N, D] -> features [R, N, D] after the final norm; with aux_layers as `Decoder.forward`, [R, N, (1 + aux) D]."""
        return self.decoder(x, nodes, cache, aux_layers)

    def pack(self) -> None:
        """Prepack weights, on devices where that helps; for inference only."""
        backend(next(self.parameters()).device).pack(self)

    def states(self, prompt: Tensor, codes: Tensor) -> Tensor:
        """prompt [B, T, D], codes [B, length] -> features of every slot, [B, T + length - 1, D], causal."""
        return self.decoder.forward_sequence(
            torch.cat((prompt, self.embed(codes[:, :-1]).to(prompt.dtype)), 1)
        )

    def forward_sequence(self, prompt: Tensor, codes: Tensor) -> Tensor:
        """prompt [B, T, D], codes [B, length] -> features [B, length, D]; feature i predicts code i."""
        return self.states(prompt, codes)[:, prompt.shape[1] - 1 :]
