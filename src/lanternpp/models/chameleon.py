"""Chameleon (arXiv 2405.09818) taught to draw: Anole-7B (2407.06135) and Lumina-mGPT-7B (2408.02657).

Both are laid out as transformers' `ChameleonForConditionalGeneration`; they differ in their prompts:

* Anole (leloy/Anole-7b-v0.1-hf): <s> prompt <reserved08706> <racm3:break>, then 32 x 32 codes, 512 px.
  The unconditional branch is <s> <racm3:break> (facebookresearch/chameleon, inference/chameleon.py, which
  draws with guidance 3, temperature 0.7 and top-p 0.9).
* Lumina (Alpha-VLLM/Lumina-mGPT-7B-512, -768 and -1024): the height and the width, in steps of 32 px, stand
  between <racm3:break> and the first code, and a row end behind every row. The unconditional branch is the same
  without prompt and <s> (lumina_mgpt/inference_solver.py; the demo draws with guidance 4 and top-k 2000).

The VQ decoder is in the checkpoint (Anole's) or in Meta's `vqgan.ckpt`, which their tokenizer folder holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.models.base import check_codes
from lanternpp.models.language import Raster, TokenTarget, language_rules
from lanternpp.models.tokens import Text, first_code
from lanternpp.models.vq.layouts import TAMING, read_vqgan
from lanternpp.models.vq.llamagen import read_tokenizer, save_tokenizer
from lanternpp.models.vq.vqgan import VQGAN, PublishedVQ, VQGANConfig
from lanternpp.nn import llama
from lanternpp.nn.configs import Codes, Positions, RopeBase, Size, config_as
from lanternpp.nn.decoder import DecoderConfig
from lanternpp.nn.sources import SAME, Rename, Source, blank
from lanternpp.nn.stores import Store
from lanternpp.util.schema import Between

PATCH, STEP = 16, 2  # pixels of a code's side; codes of a step of the size
BEGIN, END_OF_TURN, DRAW, ROW_END = "<s>", "<reserved08706>", "<racm3:break>", "<reserved08799>"
VQ = r"model\.vqmodel\."
VQ_FILES = ("vqgan.safetensors", "vqgan.ckpt", "tokenizer/vqgan.safetensors", "tokenizer/vqgan.ckpt")
NO_CODES = "it only writes text; Anole-7B and Lumina-mGPT-7B draw"


@dataclass(frozen=True)
class Dialect:
    """The prompt format of a finetuned Chameleon, and its recommended settings."""

    most: int  # codes of its largest images
    ends: bool  # the size before the first code, and a row end behind every row
    request: str
    defaults: Mapping[str, float]


DIALECTS = {
    "anole": Dialect(1024, False, "{prompt}", {"cfg": 3.0, "temperature": 0.7, "top_p": 0.9}),
    "lumina": Dialect(
        4096,
        True,
        "Generate an image of {size} according to the following prompt:\n{prompt}",
        {"cfg": 4.0, "top_k": 2000},
    ),
}


@dataclass(frozen=True)
class ChameleonConfig:
    """The shape of a Chameleon that draws."""

    shape: DecoderConfig
    vq: VQGANConfig
    dialect: Literal["anole", "lumina"]
    tokens: Codes  # of the vocabulary that codes are part of
    positions: Positions
    base: RopeBase  # of the rotations
    size: Size  # pixels: WIDTHxHEIGHT, or the side of a square

    @property
    def raster(self) -> Raster:
        """The layout of an image's codes; InputError where it cannot be drawn."""
        dialect = DIALECTS[self.dialect]
        return Raster.of(self.size, PATCH, dialect.ends, dialect.most, STEP)

    @property
    def pixels(self) -> str:
        """The size as WIDTHxHEIGHT."""
        return f"{self.raster.columns * PATCH}x{self.raster.rows * PATCH}"


@dataclass(frozen=True)
class Published:
    """Further fields of a config.json in transformers' layout."""

    vq_config: PublishedVQ | None = None
    swin_norm: bool | None = None
    size: Size | Annotated[int, Between(1, 1 << 16)] | None = None


class ChameleonTarget(TokenTarget):
    """A Chameleon that draws."""

    kind = "chameleon"
    any_size = True
    about = "Anole-7B and Lumina-mGPT-7B in transformers' layout"

    def __init__(self, config: ChameleonConfig, text: Text, vq: VQGAN):
        raster, codes = config.raster, config.vq.codes
        first = first_code(text, image_token(0), image_token(codes - 1), codes, NO_CODES)
        row_end = text.id(ROW_END) if raster.ends else None
        slots = self.slots_within(config.positions, raster)
        super().__init__(
            config.shape,
            self.rotary_table(slots, raster, config.shape, config.base),
            self.tokens_of(first, codes, row_end),
            raster,
            config.tokens,
        )
        self.config, self.text, self.dialect = config, text, DIALECTS[config.dialect]
        self.defaults = {k: min(v, codes) for k, v in self.dialect.defaults.items()}
        self._vq = [vq]  # in a list: not among this module's weights

    @classmethod
    def claims(cls, source: Source) -> bool:
        """transformers' model type, with or without the suffix of those who trained it on."""
        return any(kind.lower().startswith("chameleon") for kind in source.kinds)

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """The target; tokenizer.json and, unless the checkpoint has it, the VQ decoder lie beside it."""
        ours = cls.is_ours(source)
        config = config_as(ChameleonConfig, source.config, source.path) if ours else read_config(source)
        size = str(source.given.get("size") or config.size)
        if size != config.size and not DIALECTS[config.dialect].ends:
            raise InputError(f"size {size} cannot be drawn; this model draws {config.pixels} pixels alone")
        config = replace(config, size=size)
        vq = read_vq(source, cls.beside(source), config.vq, dtype, device, ours)
        check_codes(source.path, config.vq.codes, cls.beside(source), len(vq.codebook))
        with blank(source.path):
            target = cls(config, cls.text_of(source), vq)
        mapped, skip = ([SAME], ()) if ours else (rules(source, target), (VQ + ".*", r".*\.inv_freq"))
        source.fill(target, mapped, dtype, skip, device)
        return target.to(device)

    def save_vq(self, folder: Path, store: Store) -> None:
        """Write the VQ decoder into a tokenizer folder."""
        save_tokenizer(self._vq[0], folder, store)

    @property
    def codebook(self) -> Tensor:
        """[V, C] latents, the row end's far from all others."""
        return self.with_row_end(self._vq[0].codebook)

    def conditional(self, text: str) -> list[int]:
        """<s> request <reserved08706>, and what the image begins with."""
        request = self.dialect.request.format(size=self.config.pixels, prompt=text)
        return [self.text.id(BEGIN), *self.text.ids(request), self.text.id(END_OF_TURN), *self._begin()]

    def unconditional(self, text: str | None) -> list[int]:
        """What the image begins with alone; Anole's after <s>."""
        return self._begin() if self.raster.ends else [self.text.id(BEGIN), *self._begin()]

    def _begin(self) -> list[int]:
        sides = (self.raster.rows, self.raster.columns) if self.raster.ends else ()
        return [self.text.id(DRAW), *(self.text.id(f"<reserved{8800 + n // STEP:05d}>") for n in sides)]

    def pixels(self, codes: Tensor) -> Tensor:
        """codes [B, length] -> images [B, 3, H, W] in [-1, 1]."""
        return self._vq[0].draw(self.raster.grid(codes))


def image_token(code: int) -> str:
    """The name of a code's token: its decimal digits as the letters A to J."""
    return f"IMGIMG{''.join(chr(ord('A') + int(digit)) for digit in str(code))}Z"


def read_config(source: Source) -> ChameleonConfig:
    """The config of a checkpoint in transformers' layout."""
    where = source.path
    given, published = llama.fields(source.config, where), config_as(Published, source.config, where)
    vq, lumina = published.vq_config or PublishedVQ(), is_lumina(source)
    called = re.search(r"Lumina-mGPT-\d+B-(\d+)", str(where.resolve()))  # its config does not say
    side = (called[1] if called else 768) if lumina else vq.resolution
    config = {
        "shape": given.decoder(where, qk_norm=True, norm_after=bool(published.swin_norm)),
        "vq": vq.shape(unit=False),
        "dialect": "lumina" if lumina else "anole",
        "tokens": given.vocab_size,
        "positions": given.max_position_embeddings,
        "base": given.rope_base(where),
        "size": str(published.size or side),
    }
    return config_as(ChameleonConfig, config, where)


def is_lumina(source: Source) -> bool:
    """Whether a checkpoint is Lumina's: by its class, or by norms of queries that heads share.

    Its authors keep one row of them per model-parallel rank of the pretraining (Alpha-VLLM/Chameleon_7B_mGPT,
    model card), transformers one per head.
    """
    return any("xllmx" in kind.lower() for kind in source.kinds) or norm_rows(source)[0] != source.config.get(
        "num_attention_heads"
    )


def norm_rows(source: Source) -> tuple[int, int]:
    """Rows of the norms of queries and of keys; InputError where there are none."""
    queries, keys = (source.shape(f"model.layers.0.self_attn.{x}_norm.weight", 2)[0] for x in "qk")
    return queries, keys


def rules(source: Source, target: ChameleonTarget) -> list[Rename]:
    """transformers' names as ours."""
    return [
        Rename(r"lm_head\.weight", "output.weight", rows=target.code_tokens),
        *language_rules(r"model\.", target.config.shape, norm_rows=norm_rows(source)),
    ]


def read_vq(
    source: Source,
    folder: Path,
    config: VQGANConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    ours: bool,
) -> VQGAN:
    """The VQ decoder: given, from the checkpoint, or from a file beside it."""
    if ours:
        return read_tokenizer(Source.open(folder / "tokenizer"), 0, dtype, device)
    given = source.given.get("tokenizer")
    if given is None and "model.vqmodel.decoder.conv_in.weight" in source.shapes():
        return read_vqgan(source, config, TAMING, VQ, dtype, device)
    files = [Path(given)] if given else [folder / name for name in VQ_FILES]
    file = next((path for path in files if path.exists()), None)
    if file is None:
        raise InputError(
            f"{folder} has no VQ decoder: put the vqgan.ckpt of Chameleon's tokenizer folder there, "
            "or use lanternpp convert MODEL OUT --vq FILE"
        )
    return read_vqgan(Source.open(file), config, TAMING, "", dtype, device)
