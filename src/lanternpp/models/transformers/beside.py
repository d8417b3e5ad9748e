"""Adapters of models whose image tokenizer is another checkpoint, and of plain language models among these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.base import check_codes
from lanternpp.models.hub import fetch, hub_id
from lanternpp.models.transformers.adapter import TransformersTarget
from lanternpp.models.transformers.format import Raster
from lanternpp.models.transformers.opening import Text
from lanternpp.models.vq.codes import nearest, resized
from lanternpp.models.vq.layouts import read_vqgan, save_tokenizer
from lanternpp.models.vq.vqgan import VQGAN
from lanternpp.nn.checkpoints import CONFIG, Store
from lanternpp.nn.sources import Source

MOST = 1 << 14  # codes of a picture


class TokenizerBeside(TransformersTarget):
    """Codes are looked up and become pixels in a `VQGAN`, which a model of the user's comes without."""

    vq_files: ClassVar[tuple[str, ...]]  # in the folder of a checkpoint, or beside it
    vq_hub: ClassVar[str] = ""  # where its authors publish it
    vq_hint: ClassVar[str] = ""  # more about the file, for the message that it is missing
    within: ClassVar[str] = ""  # the beginning of its tensors' names in a checkpoint that has them
    vqgan: VQGAN | None  # of a model that `read` opened

    def __init__(self, model: Any, body: Any, codes: Sequence[int], **more: Any):
        super().__init__(model, body, codes, **more)
        self.vqgan = None

    def read_vq(self, source: Source, dtype: torch.dtype) -> None:
        """Read the tokenizer: given, from the checkpoint's tensors that begin with `within`, from a folder of ours, from a
        file beside the checkpoint, or from the hub. InputError where it is nowhere, or has other codes.
        """
        within, given = self.within, source.given.get("tokenizer")
        if given is None and within and f"{within}decoder.conv_in.weight" in source.metas:
            place, self.vqgan = source.path, read_vqgan(source, dtype, prefix=within)
        else:
            place = Path(given) if given else self._found(source.folder)
            self.vqgan = self.tokenizer_in(Source.open(place), dtype)
        check_codes(source.path, len(self.codes), place, self.vqgan.config.codes)

    def tokenizer_in(self, source: Source, dtype: torch.dtype) -> VQGAN:
        """The tokenizer in a checkpoint of taming-transformers' layout, or in a folder of ours. InputError."""
        return read_vqgan(source, dtype)

    def _found(self, folder: Path) -> Path:
        """The path of the tokenizer."""
        ours = folder.parent / "tokenizer"
        if folder.name == "target" and (ours / CONFIG).is_file():
            return ours
        for name in self.vq_files:
            if (folder / name).exists():
                return folder / name
        reason = ""
        if hub := hub_id(self.vq_hub):
            try:
                return fetch(hub)
            except InputError as error:
                reason = f" ({error})"
        raise InputError(
            f"{folder} has no VQ decoder: put {self.vq_files[0]} there, or use lanternpp models convert MODEL OUT --vq FILE{reason}{self.vq_hint}"
        )

    @property
    def vq(self) -> Any:
        """The tokenizer."""
        return self.vqgan

    @property
    def latents(self) -> Tensor | None:
        """The tokenizer's codebook; None of a model of the user's."""
        return None if self.vqgan is None else self.vqgan.codebook

    def decoded(self, grid: Tensor) -> Tensor:
        """Images by the tokenizer's decoder."""
        return self.vq.draw(grid)

    def encoder(self) -> nn.Module | None:
        """The tokenizer's, where its file has one."""
        read = self.vqgan and self.vqgan.encoder
        return read().to(self.device) if read else None

    @cached_property
    def _reading(self) -> nn.Module:
        found = self.encoder()
        if found is None:
            raise InputError(
                "this model's tokenizer was kept without its encoder: use the model as it was published"
            )
        return found

    def read_picture(self, picture: Any, count: int) -> Tensor:
        """A PIL image, RGB, as codes [rows, columns], about `count` of them in its own shape. InputError."""
        assert self.vqgan is not None
        pixels = resized(picture, count, self.pixels_per_code)
        with torch.no_grad():
            latents = self._reading(pixels.to(next(self._reading.parameters())))
            return nearest(latents, self.vqgan.codebook, self.by_product)[0]

    def save(self, folder: Path, store: Store) -> list[str]:
        """The tokenizer's decoder is written too. InputError where a family has a decoder of its own."""
        if self.vqgan is None:
            raise InputError(
                f"the decoder of a {type(self).__name__} cannot be written; use its checkpoint as it is"
            )
        parts = super().save(folder, store)
        save_tokenizer(self.vq, folder / "tokenizer", store)
        return [*parts, "tokenizer"]


class LanguageModel(TokenizerBeside):
    """Its last tokens are codes of square pictures, without row ends; its class in transformers is that of a plain model.

    In `generate`, generation_mode="image" draws a square of codes, and `prefix_allowed_tokens_fn` any other format. A config.json may say
    how many codes there are, by `levels`, and the `size` of a picture; those of published models do not.
    """

    draws_after: ClassVar[str]  # the token that the first code follows
    text_tokens: ClassVar[int]  # those before the codes of published models
    levels: tuple[int, ...]  # of published models; their product is the number of codes
    # Pixels of the squares that published models draw; the first one where no size is given.
    sizes: ClassVar[tuple[str, ...]]
    fields: ClassVar[Mapping[str, Any]] = {}  # of a config.json, whatever it says

    def __init__(self, model: Any):
        config, tokens = model.config, int(model.config.vocab_size)
        self.levels = tuple(getattr(config, "levels", self.levels))
        count, first = prod(self.levels), getattr(config, "first_code", None)
        start = tokens - count if first is None else first
        # a model of the user's comes without a tokenizer: its number of tokens tells it from others of its class
        other = first is None and not hasattr(config, "levels") and start != self.text_tokens
        if other or min(self.levels) < 2 or not 0 <= start <= tokens - count:
            raise InputError(
                f"this {type(model).__name__} of {tokens} tokens has no {count} codes; known is {self.about}"
            )
        super().__init__(model, model.model, range(start, start + count))
        sizes = [str(size) for size in (getattr(config, "size", None), *self.sizes) if size]
        self.sides = [Raster.of(size, self.pixels_per_code, False, MOST).rows for size in sizes]

    @classmethod
    def fields_of(cls, source: Source) -> Mapping[str, Any]:
        """Codes begin after the last token of the tokenizer of texts."""
        words = Text(source.folder).vocabulary()
        if cls.draws_after not in words:
            raise InputError(
                f"{source.path} has no token {cls.draws_after}: it only writes text; known is {cls.about}"
            )
        return {**cls.fields, "first_code": max(words.values()) + 1}
