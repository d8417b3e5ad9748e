"""Lumina-mGPT-7B (arXiv 2408.02657): a Chameleon that draws any size.

A prompt of Alpha-VLLM/Lumina-mGPT-7B-512, -768 and -1024 is Anole's with the height and the width, in steps of 32 px,
between <racm3:break> and the first code; a row end follows every row. The unconditional branch is the same without text and <s>
(lumina_mgpt/inference_solver.py; README.md draws with guidance 4 and top-k 2000).
"""

from __future__ import annotations

import re
from typing import Any

import torch

from lanternpp.errors import InputError
from lanternpp.models.transformers.chameleon import DRAW, END_OF_TURN, Chameleon
from lanternpp.models.transformers.format import Raster
from lanternpp.nn.sources import Source

ROW_END = "<reserved08799>"
REQUEST = "Generate an image of {size} according to the following prompt:\n{prompt}"
NORM, FIRST_NORM = r"model\.layers\.\d+\.self_attn\.[qk]_norm\.", "model.layers.0.self_attn.q_norm.weight"


class Lumina(Chameleon):
    """A Chameleon whose rows of codes end with a token."""

    about = "Lumina-mGPT-7B in transformers' layout"
    optional = (*Chameleon.optional, NORM)
    defaults = {"cfg": 4.0, "top_k": 2000}  # noqa: RUF012
    dialect = "lumina"
    default_size, max_codes, step = "768", 4096, 2

    def __init__(self, model: Any):
        words = model.model.vocabulary_mapping.vocab_map
        if ROW_END not in words:
            raise InputError(f"its vocabulary has no {ROW_END}, which ends a row: it is another model's")
        super().__init__(model, words[ROW_END])

    @classmethod
    def claims(cls, source: Source) -> bool:
        """Return whether a Chameleon was written as Lumina's by its authors' code or by ours, or its heads share norms."""
        by_authors = any("xllmx" in kind.lower() for kind in source.kinds)
        by_us = source.config.get("dialect") == cls.dialect
        norm, heads = source.metas.get(FIRST_NORM), source.config.get("num_attention_heads", 32)
        shares_norms = norm is not None and norm.ndim == 2 and len(norm) != heads
        return super().claims(source) and (by_authors or by_us or shares_norms)

    def read_vq(self, source: Source, dtype: torch.dtype) -> None:
        """Read the tokenizer, and give every head the norm of queries and keys of its group.

        A checkpoint has a row for each group, a model-parallel rank of the pretraining (Alpha-VLLM/Chameleon_7B_mGPT, model card).
        """
        super().read_vq(source, dtype)
        norms = {name: norm for name, norm in self.model.named_parameters() if re.match(NORM, name)}
        for name, norm in norms.items():
            groups, width = source.shape(name, 2)  # raises InputError where it is missing
            if width != norm.shape[1] or len(norm) % groups:
                raise InputError(
                    f"{source.path} does not fit: {name} is {(groups, width)}, and the heads are {tuple(norm.shape)}"
                )
        for name, rows, _ in source.tensors(norms):
            norm = norms[name]  # [heads, d]
            norm.data = rows[torch.arange(len(norm)) * len(rows) // len(norm)].to(norm.dtype)

    def raster_of(self, source: Source, size: str | None) -> Raster:
        """Return the raster of a size, by default of the size in the checkpoint's name, as its config has none."""
        match = re.search(r"Lumina-mGPT-\d+B-(\d+)", str(source.path.resolve()))
        return super().raster_of(source, size or (match and match[1]))

    def conditional(self, text: str) -> list[int]:
        """Return the first token, the request, <reserved08706> and the unconditional tokens."""
        request = self.filled((REQUEST, END_OF_TURN), text)
        return [self.text.id(self.text.begin), *request, *self.unconditional(None)]

    def unconditional(self, text: str | None) -> list[int]:
        """Return <racm3:break>, and the height and the width in steps."""
        steps = (self.raster.rows // self.step, self.raster.columns // self.step)
        return self.text.filled((DRAW, *(f"<reserved{8800 + count:05d}>" for count in steps)))
