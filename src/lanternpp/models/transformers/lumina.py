"""Lumina-mGPT-7B (arXiv 2408.02657): a Chameleon that draws any size.

A prompt of Alpha-VLLM/Lumina-mGPT-7B-512, -768 and -1024 is Anole's with the height and the width, in steps of 32 px,
between <racm3:break> and the first code; a row end follows every row. The unconditional branch is the same without text and <s>
(lumina_mgpt/inference_solver.py; the demo draws with guidance 4 and top-k 2000).
"""

from __future__ import annotations

import re
from typing import Any

import torch

from lanternpp.errors import InputError
from lanternpp.models.transformers.chameleon import BEGIN, DRAW, END_OF_TURN, Chameleon
from lanternpp.models.transformers.format import Raster
from lanternpp.models.transformers.opening import FirstToken
from lanternpp.nn.sources import Source

ROW_END = "<reserved08799>"
REQUEST = "Generate an image of {size} according to the following prompt:\n{prompt}"
NORM, FIRST_NORM = r"model\.layers\.\d+\.self_attn\.[qk]_norm\.", "model.layers.0.self_attn.q_norm.weight"


class Lumina(Chameleon):
    """Rows end with a token."""

    about = "Lumina-mGPT-7B in transformers' layout"

    recommended = {"cfg": 4.0, "top_k": 2000}  # noqa: RUF012
    dialect = "lumina"
    usual, largest, step = "768", 4096, 2

    def __init__(self, model: Any):
        words = model.model.vocabulary_mapping.vocab_map
        if ROW_END not in words:
            raise InputError(f"its vocabulary has no {ROW_END}, which ends a row: it is another model's")
        super().__init__(model, words[ROW_END])

    @classmethod
    def claims(cls, source: Source) -> bool:
        """A Chameleon that its authors' code or ours wrote as Lumina's, or whose heads share norms."""
        named = source.config.get("dialect") == cls.dialect or any("xllmx" in x.lower() for x in source.kinds)
        return super().claims(source) and (named or cls.shares_norms(source))

    @staticmethod
    def shares_norms(source: Source) -> bool:
        """Whether queries and keys have fewer norms than heads."""
        norm, heads = source.metas.get(FIRST_NORM), source.config.get("num_attention_heads", 32)
        return norm is not None and norm.ndim == 2 and len(norm) != heads

    @classmethod
    def model_in(cls, source: Source, dtype: torch.dtype, lacking: tuple[str, ...]) -> Any:
        """Every head gets the norm of queries and keys of its group, of which a checkpoint keeps one row.

        There is a row per model-parallel rank of the pretraining (Alpha-VLLM/Chameleon_7B_mGPT, model card).
        """
        shared = cls.shares_norms(source)
        model = super().model_in(source, dtype, (*lacking, NORM) if shared else lacking)
        names = [name for name in source.metas if shared and re.match(NORM, name)]
        for name, rows in source.tensors(names):
            own = model.get_parameter(name)
            own.data = rows[torch.arange(len(own)) * len(rows) // len(own)].to(own.dtype)
        return model

    def raster_of(self, source: Source, size: str | None) -> Raster:
        """Any size; the checkpoint's name says one, as its config does not."""
        called = re.search(r"Lumina-mGPT-\d+B-(\d+)", str(source.path.resolve()))
        return super().raster_of(source, size or (called and called[1]))

    def conditional(self, text: str) -> list[int]:
        """The first token, the request <reserved08706>, and the size."""
        raster, ids, side = self.raster, self.text, self.pixels_per_code
        text = REQUEST.format(size=f"{raster.columns * side}x{raster.rows * side}", prompt=text)
        begin = ids.begin if isinstance(ids, FirstToken) else BEGIN
        return [ids.id(begin), *ids.ids(text), ids.id(END_OF_TURN), *self.unconditional(None)]

    def unconditional(self, text: str | None) -> list[int]:
        """<racm3:break> and the size."""
        sides = (self.raster.rows, self.raster.columns)
        return [self.text.id(DRAW), *(self.text.id(f"<reserved{8800 + n // self.step:05d}>") for n in sides)]
