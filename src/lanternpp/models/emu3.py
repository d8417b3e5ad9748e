"""Emu3-Gen (arXiv 2409.18869): one language model over text and codes, in rows that end with a token.

The layout is transformers' `Emu3ForConditionalGeneration` (BAAI/Emu3-Gen-hf). A prompt is <|extra_203|> text
<|image start|> HEIGHT*WIDTH <|image token|>, in codes; the unconditional branch has a negative prompt in its place
(both texts, guidance 3 and top-k 2048 are from baaivision/Emu3, image_generation.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lanternpp.models.language import Raster, TokenTarget, language_rules
from lanternpp.models.tokens import Text, first_code
from lanternpp.models.vq.emu3 import Emu3Decoder, Emu3VQConfig, read_emu3, save_emu3
from lanternpp.nn import llama
from lanternpp.nn.configs import Codes, Positions, Prompt, RopeBase, Size, config_as
from lanternpp.nn.decoder import DecoderConfig
from lanternpp.nn.sources import SAME, Rename, Source, blank
from lanternpp.nn.stores import Store

BEGIN, ROW_END = "<|extra_203|>", "<|extra_200|>"
IMAGE, CODES = "<|image start|>", "<|image token|>"
WANTED = " masterpiece, film grained, best quality."
UNWANTED = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, "
    "worst quality, low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
SIZE, MOST = "720", 8100  # pixels of a square; codes of the largest image
LANGUAGE, VQ = r"(?:model\.text_model\.|text_model\.model\.)", r"(?:model\.)?vqmodel\."


@dataclass(frozen=True)
class Emu3Config:
    """The shape of an Emu3."""

    shape: DecoderConfig
    vq: Emu3VQConfig
    tokens: Codes  # of the vocabulary that codes are part of
    positions: Positions
    base: RopeBase  # of the rotations
    size: Size = SIZE  # pixels: WIDTHxHEIGHT, or the side of a square
    wanted: Prompt = WANTED  # follows every prompt
    unwanted: Prompt = UNWANTED  # the negative prompt


@dataclass(frozen=True)
class Published:
    """The parts of a config.json in transformers' layout."""

    text_config: Mapping[str, Any]
    vq_config: Emu3VQConfig = Emu3VQConfig()  # noqa: RUF009 (it is frozen)
    size: Size = SIZE


class Emu3Target(TokenTarget):
    """An Emu3 that draws."""

    kind = "emu3"
    any_size = True
    about = "Emu3-Gen in transformers' layout"

    def __init__(self, config: Emu3Config, text: Text, vq: Emu3Decoder):
        raster = Raster.of(config.size, vq.down, True, MOST)
        codes = len(vq.codebook)
        first = first_code(text, visual_token(0), visual_token(codes - 1), codes, "Emu3-Gen draws")
        slots = self.slots_within(config.positions, raster)
        super().__init__(
            config.shape,
            self.rotary_table(slots, raster, config.shape, config.base),
            self.tokens_of(first, codes, text.id(ROW_END)),
            raster,
            config.tokens,
        )
        self.config, self.text = config, text
        self.defaults = {"cfg": 3.0, "top_k": min(2048, codes)}
        self._vq = [vq]  # in a list: not among this module's weights

    @classmethod
    def claims(cls, source: Source) -> bool:
        """transformers' model type."""
        return "emu3" in source.kinds

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """The target; tokenizer.json lies beside the checkpoint."""
        ours = cls.is_ours(source)
        config = config_as(Emu3Config, source.config, source.path) if ours else read_config(source)
        config = replace(config, size=str(source.given.get("size") or config.size))
        place = Source.open(cls.beside(source) / "tokenizer") if ours else source
        vq = read_emu3(place, None if ours else VQ, config.vq, dtype, device)
        with blank(source.path):
            target = cls(config, cls.text_of(source), vq)
        mapped, skip = ([SAME], ()) if ours else (rules(target), (VQ + ".*", r".*\.inv_freq"))
        source.fill(target, mapped, dtype, skip, device)
        return target.to(device)

    def save_vq(self, folder: Path, store: Store) -> None:
        """Write the VQ decoder into a tokenizer folder."""
        save_emu3(self._vq[0], folder, store)

    @property
    def codebook(self) -> Tensor:
        """[V, C] latents, the row end's far from all others."""
        return self.with_row_end(self._vq[0].codebook)

    def conditional(self, text: str) -> list[int]:
        """The prompt, the words that follow every prompt, and the size."""
        return self._request(text + self.config.wanted)

    def unconditional(self, text: str | None) -> list[int]:
        """The negative prompt, and the size."""
        return self._request(self.config.unwanted)

    def _request(self, words: str) -> list[int]:
        size = self.text.ids(f"{self.raster.rows}*{self.raster.columns}")
        return [
            self.text.id(BEGIN),
            *self.text.ids(words),
            self.text.id(IMAGE),
            *size,
            self.text.id(CODES),
        ]

    def pixels(self, codes: Tensor) -> Tensor:
        """codes [B, length] -> images [B, 3, H, W] in [-1, 1]."""
        return self._vq[0].decode(self.raster.grid(codes))


def visual_token(code: int) -> str:
    """The name of a code's token."""
    return f"<|visual token {code:06d}|>"


def read_config(source: Source) -> Emu3Config:
    """The config of a checkpoint in transformers' layout."""
    where = source.path
    published = config_as(Published, source.config, where)
    given = llama.fields(published.text_config, where)
    config = {
        "shape": given.decoder(where),
        "vq": published.vq_config,
        "tokens": given.vocab_size,
        "positions": given.max_position_embeddings,
        "base": given.rope_base(where, 1e6),
        "size": published.size,
    }
    return config_as(Emu3Config, config, where)


def rules(target: Emu3Target) -> list[Rename]:
    """transformers' names, as its class writes them and as the hub's files have them, as ours."""
    return [
        Rename(r"(?:text_model\.)?lm_head\.weight", "output.weight", rows=target.code_tokens),
        *language_rules(LANGUAGE, target.config.shape),
    ]
