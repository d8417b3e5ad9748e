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
from lanternpp.nn.checkpoints import STORES, Store
from lanternpp.nn.decoder import AttentionCache, Decoder
from lanternpp.nn.sources import Source
from lanternpp.types import Depicted, Nodes, Prompt


def quoted(prompt: str, max_characters: int = 80) -> str:
    """Return a prompt in quotes for a message, or the beginning of a long prompt."""
    return repr(prompt if len(prompt) <= max_characters else f"{prompt[: max_characters - 1]}…")


class PromptWarning(UserWarning):
    """A part of the prompt that the model cannot follow."""


_collected: ContextVar[list[str] | None] = ContextVar("prompt_warnings", default=None)


@contextmanager
def prompt_warnings() -> Iterator[list[str]]:
    """Collect this thread's warnings of prompts that are read in the block, which Python then does not issue."""
    sentences: list[str] = []
    token = _collected.set(sentences)
    try:
        yield sentences
    finally:
        _collected.reset(token)


def warn_of_prompt(sentence: str) -> None:
    """Issue a PromptWarning, or add the sentence to the warnings that a block of `prompt_warnings` collects."""
    sentences = _collected.get()
    if sentences is None:
        warnings.warn(sentence, PromptWarning, stacklevel=3)
    else:
        sentences.append(sentence)


def check_codes(target: Path, target_codes: int, tokenizer: Path, tokenizer_codes: int) -> None:
    """Check that a tokenizer has as many codes as its target; raise InputError otherwise."""
    if target_codes != tokenizer_codes:
        raise InputError(
            f"{target} has {target_codes} codes and the tokenizer {tokenizer} has {tokenizer_codes}; use the tokenizer "
            "that it was trained with"
        )


class Target(nn.Module, ABC):
    """The autoregressive model whose distribution is decoded. Codes are 0..V-1; a family maps codes to its vocabulary.

    A family with the table `codes_in`, the linear layer `codes_out` and the tokenizer `vq` inherits `embed`, `head`, `codebook` and
    `pixels`.
    """

    vocab: int  # V; 0 of latents
    channels: int = 0  # C, numbers of a continuous latent; 0: pictures are of codes
    length: int  # codes of an image, in raster order
    width: int  # codes of one image row
    slots: int  # T of the longest prompt
    decoder: Decoder
    codes_in: nn.Embedding
    codes_out: nn.Linear
    vq: Any = None  # the tokenizer, which turns codes or latents into pixels; vars(target)["vq"] sets it, as it is no submodule
    native_head: HeadLogits | None = None  # of a target that is read for inference
    engine: ClassVar[str] = "lanternpp.engine.decode:Engine"  # the class that decodes the target
    any_size: ClassVar[bool] = False  # whether `read` takes a size in pixels from the user
    about: ClassVar[str] = ""  # its checkpoints, for the message about an unknown one
    defaults: Mapping[str, Any] = {}  # recommended settings, for models without a defaults.json
    stores: ClassVar[tuple[str, ...]] = STORES  # formats that `save` writes
    without_pixels: ClassVar[str] = ""  # for a message: how to get pixels, if not by `pixels`

    @classmethod
    def claims(cls, source: Source) -> bool:
        """Return whether a checkpoint without our own `kind` is of this family, by its config and its tensors' names and shapes."""
        return False

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """Read the target in `source`, ready to draw, and the tokenizers and encoders around `source.path`.

        Raises InputError where a part is missing or does not fit.
        """
        raise NotImplementedError

    @classmethod
    def check_store(cls, store: Store) -> None:
        """Check that `save` writes models of the family in this format; raise InputError otherwise."""
        if cls.without_pixels:
            raise InputError(f"a {cls.__name__} cannot be converted; use its checkpoint as it is")
        if store not in cls.stores:
            raise InputError(f"{cls.__name__} is written in {' or '.join(cls.stores)}, not {store}")

    def save(self, folder: Path, store: Store) -> list[str]:
        """Write target and tokenizer into a model folder of ours, and return the parts written; InputError if they cannot be."""
        raise InputError(f"a {type(self).__name__} cannot be converted; use its checkpoint as it is")

    @property
    def codebook(self) -> Tensor | None:
        """[V, C] the latent vector of every code, l2-normalised by most tokenizers; None where there is no table."""
        return getattr(self.vq, "codebook", None)

    @abstractmethod
    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """Encode b conditions (None: the null condition) as [branches * b, T, D], conditional rows first."""

    def check(self, condition: str | None) -> None:
        """Check a condition; raise the InputError or issue the warnings of `prompt`."""
        self.prompt([condition], 1)

    def embed(self, codes: Tensor) -> Tensor:
        """Embed codes [R, N] as [R, N, D]."""
        return self.codes_in(codes)

    def examples(self, count: int) -> Tensor:
        """Return up to `count` codes [n], evenly over all codes; a drafter's file knows its target by their embeddings."""
        device, count = self.decoder.rotary_table.device, min(self.vocab, count)
        return torch.linspace(0, self.vocab - 1, count, dtype=torch.float32, device=device).long()

    def head(self, features: Tensor) -> Tensor:
        """Return the logits [..., V] of features [..., D]."""
        return self.codes_out(features)

    @property
    def head_linear(self) -> nn.Module | None:
        """The linear layer of `head`, with weight [V, D] and bias; None where `head` is another function."""
        return self.codes_out if type(self).head is Target.head else None

    def pixels(self, codes: Tensor) -> Tensor:
        """Decode codes [B, length] to images [B, 3, H, W] in [-1, 1]."""
        return self.vq.decode(codes)

    @property
    def conditions(self) -> Sequence[str]:
        """All conditions; empty where they cannot be listed."""
        return ()

    @property
    def words(self) -> Mapping[str, Sequence[str]]:
        """The words of prompts, a list for each kind of word; empty where they cannot be listed."""
        return {}

    def depicted(self, prompt: str, pictures: Sequence[Any], own_shape: bool = True) -> Depicted:
        """Encode a prompt that shows pictures (PIL images, RGB) beside its text; `shaped` gives the target that draws it.

        own_shape: whether to draw in the shape of the last picture, if the user gave `read` no size. Raises InputError where the
        family reads no pictures.
        """
        raise InputError(f"a {type(self).__name__} draws from text alone: leave out image")

    def shaped(self, shape: Hashable) -> Target:
        """Return the target that draws prompts of a shape (`Depicted.shape`), with the same weights; None: this target."""
        return self

    def cache_prompts(self, prompts: int) -> None:
        """Keep the encoded features of up to `prompts` further prompts, which will be used repeatedly."""
        return

    def release_encoder(self) -> None:
        """Free the text encoder, if the target has one; the next new prompt loads it again."""
        return

    def reader(self) -> Reader:
        """Return the reader of pictures as codes, by the tokenizer's encoder; InputError where it has none."""
        raise InputError(
            f"the tokenizer of this {type(self).__name__} only draws: use --self instead of --data."
        )

    def from_cache(self, found: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return cached codes, or latents drawn by cached moments, [B, length, ...]; generator: of the CPU, None for the global one."""
        return found

    def constrain(self, logits: Tensor, index: Tensor) -> Tensor:
        """Set the logits [B, N, V] of codes that the format forbids at places `index` [B, N] to -inf."""
        return logits

    def forward(
        self, x: Tensor, nodes: Nodes, cache: AttentionCache, aux_layers: tuple[int, ...] = ()
    ) -> Tensor:
        """Return features [R, N, D] of x [R, N, D] after the final norm; with `aux_layers` [R, N, (1 + aux) D], as `Decoder`."""
        return self.decoder(x, nodes, cache, aux_layers)

    def pack(self) -> None:
        """Pack weights for inference, on devices where packed weights are faster."""
        backend(next(self.parameters()).device).pack(self)

    def forward_sequence(self, prompt: Tensor, codes: Tensor) -> Tensor:
        """Return features [B, length, D] of prompt [B, T, D] and codes [B, length], by a causal pass; feature i predicts code i."""
        inputs = torch.cat((prompt, self.embed(codes[:, :-1]).to(prompt.dtype)), 1)
        return self.decoder.forward_sequence(inputs)[:, prompt.shape[1] - 1 :]
