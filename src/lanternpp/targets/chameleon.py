"""Chameleon (arXiv 2405.09818) finetuned to draw: Anole-7B (2407.06135) and Lumina-mGPT-7B (2408.02657).

The layout is transformers' `ChameleonForConditionalGeneration`. Two dialects of it are published:

* Anole (leloy/Anole-7b-v0.1-hf): 32 x 32 codes, 512 px. A prompt is <s> text <reserved08706>
  <racm3:break>, and guidance leads away from <s> <racm3:break> (facebookresearch/chameleon,
  inference/chameleon.py: guidance 3 for text).
* Lumina (Alpha-VLLM/Lumina-mGPT-7B-512, -768, -1024): any grid of that many codes; a row end behind every
  row; the height and the width in steps of 32 px before the first code; guidance leads away from the prompt
  without its text (lumina_mgpt/inference_solver.py: guidance 4, top-k 2000 of the demo). Its norms of queries
  and keys have one row for all heads.

Neither checkpoint of the second kind holds the VQ decoder: it is Meta's `tokenizer/vqgan.ckpt`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.nn import llama
from lanternpp.nn.sources import Rename, Source
from lanternpp.targets.language import Raster, TokenTarget
from lanternpp.targets.text import Text, first_code
from lanternpp.vq.taming import TamingConfig, TamingDecoder, named, read_taming

PATCH = 16  # pixels of an image's side per code
START, STOP, SIZES = "<racm3:break>", "<reserved08706>", 8800  # <reserved08800 + n>: n steps of 32 px
ROW_END = "<reserved08799>"
VQ_FILES = ("vqgan.safetensors", "vqgan.ckpt", "tokenizer/vqgan.safetensors", "tokenizer/vqgan.ckpt")
SKIP = (r"model\.vqmodel\..*", r".*rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Dialect:
    """How a finetuned model is asked for an image."""

    ends: bool  # a row end behind every row, and the size before the first code
    side: int  # pixels, of a square image
    request: str  # around the prompt
    any_size: bool = False


ANOLE = Dialect(ends=False, side=512, request="{prompt}")
LUMINA = Dialect(
    ends=True,
    side=768,
    request="Generate an image of {size} according to the following prompt:\n{prompt}",
    any_size=True,
)


class ChameleonTarget(TokenTarget):
    """A Chameleon that draws."""

    def __init__(
        self,
        text: Text,
        dialect: Dialect,
        vq: TamingDecoder,
        *shape_and_tables: object,
    ):
        super().__init__(*shape_and_tables)  # type: ignore[arg-type]
        self.text, self.dialect = text, dialect
        self._vq = [vq]  # in a list: not part of this module's weights
