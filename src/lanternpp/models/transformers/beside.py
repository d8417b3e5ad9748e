"""Base classes of adapters whose image tokenizer is another checkpoint, and of those on plain language models."""

from __future__ import annotations

from collections.abc import Mapping
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
from lanternpp.models.vq.layouts import read_vqgan
from lanternpp.models.vq.vqgan import VQGAN
from lanternpp.nn.checkpoints import CONFIG
from lanternpp.nn.sources import Source

MAX_CODES = 1 << 14  # of a picture


class TokenizerBeside(TransformersTarget):
    """A target whose codes become pixels in a `VQGAN`, which a model that the user opened comes without."""

    vq_files: ClassVar[tuple[str, ...]]  # paths of its file, from the folder of a checkpoint
    vq_hub: ClassVar[str] = ""  # its repository, or file, on the hub
    vq_hint: ClassVar[str] = ""  # how to get the file, for the message that it is missing
    vq_prefix: ClassVar[str] = ""  # of the names of its tensors in a checkpoint that has them

    def read_vq(self, source: Source, dtype: torch.dtype) -> None:
        """Read the tokenizer that the user names, or that of the checkpoint, of a folder of ours, of a file beside the
        checkpoint or of the hub, in this order. Raises InputError where there is none, or it has other codes.
        """
        prefix, chosen = self.vq_prefix, source.given.pop("vq", None)
        if chosen is None and prefix and f"{prefix}decoder.conv_in.weight" in source.metas:
            path = source.path
            vq = read_vqgan(source, dtype, prefix=prefix)
        else:
            path = Path(chosen) if chosen else self._find_vq(source.folder)
            vq = self.tokenizer_in(Source.open(path), dtype)
        check_codes(source.path, len(self.codes), path, vq.config.codes)
        vars(self)["vq"] = vq

    def tokenizer_in(self, source: Source, dtype: torch.dtype) -> VQGAN:
        """Read the tokenizer in a checkpoint of taming-transformers' layout, or in a folder of ours."""
        return read_vqgan(source, dtype)

    def _find_vq(self, folder: Path) -> Path:
        converted = folder.parent / "tokenizer"
        if folder.name == "target" and (converted / CONFIG).is_file():
            return converted
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

    @cached_property
    def _encoder(self) -> nn.Module:
        return self.encoder()

    def read_picture(self, picture: Any, count: int) -> Tensor:
        """Encode a PIL image, RGB, in its own shape as about `count` codes [rows, columns]; InputError without an encoder."""
        pixels = resized(picture, count, self.pixels_per_code)
        with torch.no_grad():
            latents = self._encoder(pixels.to(next(self._encoder.parameters())))
            return nearest(latents, self.vq.codebook, self.by_product)[0]


class LanguageModel(TokenizerBeside):
    """A language model whose last tokens are codes of square pictures, without row ends; its class in transformers is a plain one.

    In `generate`, generation_mode="image" draws a square of codes, and `prefix_allowed_tokens_fn` any other format. A config.json
    of ours says how many codes there are, by `levels`, and the `size` of a picture; those of published models do not.
    """

    text_tokens: ClassVar[int]  # tokens before the codes in published models
    levels: tuple[int, ...]  # of published models; their product is the number of codes
    fields: ClassVar[Mapping[str, Any]] = {}  # of its config, in place of those of config.json

    def __init__(self, model: Any):
        config, vocab_size = model.config, int(model.config.vocab_size)
        self.levels = tuple(getattr(config, "levels", self.levels))
        num_codes, first_code = prod(self.levels), getattr(config, "first_code", None)
        start = vocab_size - num_codes if first_code is None else first_code
        # A model that the user opened has no tokenizer of texts: its number of tokens tells it from others of its class.
        has_fields = first_code is not None or hasattr(config, "levels")
        foreign = not has_fields and start != self.text_tokens
        if foreign or min(self.levels) < 2 or not 0 <= start <= vocab_size - num_codes:
            raise InputError(
                f"this {type(model).__name__} of {vocab_size} tokens has no {num_codes} codes; known is {self.about}"
            )
        super().__init__(model, model.model, range(start, start + num_codes))
        if size := getattr(config, "size", None):
            self.sides = (Raster.of(str(size), self.pixels_per_code, False, MAX_CODES).rows, *self.sides)

    @classmethod
    def fields_of(cls, source: Source) -> Mapping[str, Any]:
        """Return `fields`, and the first code, which follows the last token of the tokenizer of texts."""
        ids = Text(source.folder).vocabulary()
        if cls.request[-1] not in ids:
            raise InputError(
                f"{source.path} has no token {cls.request[-1]}: it only writes text; known is {cls.about}"
            )
        return {**cls.fields, "first_code": max(ids.values()) + 1}
