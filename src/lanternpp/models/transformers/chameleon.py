"""Chameleon (arXiv 2405.09818) taught to draw: Anole-7B (2407.06135) and Lumina-mGPT-7B (2408.02657).

* Anole (leloy/Anole-7b-v0.1-hf): <s> prompt <reserved08706> <racm3:break>, then 32 x 32 codes, 512 px. The unconditional branch is
  <s> <racm3:break> (facebookresearch/chameleon, inference/chameleon.py, which draws with guidance 3, temperature 0.7 and top-p 0.9).
* Lumina (Alpha-VLLM/Lumina-mGPT-7B-512, -768 and -1024): the height and the width, in steps of 32 px, stand between <racm3:break> and
  the first code, and a row end after every row. The unconditional branch is the same without prompt and <s>
  (lumina_mgpt/inference_solver.py; the demo draws with guidance 4 and top-k 2000).

transformers' class has no VQ decoder: its weights are in the checkpoint (Anole's) or in Meta's `vqgan.ckpt`, beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.base import check_codes
from lanternpp.models.transformers.adapter import OneVocabulary
from lanternpp.models.transformers.call import Call, set_length
from lanternpp.models.transformers.format import Format, Raster
from lanternpp.models.transformers.opening import Text, config_of, folder_of, opened
from lanternpp.models.vq.layouts import read_vqgan
from lanternpp.models.vq.llamagen import read_tokenizer, save_tokenizer
from lanternpp.models.vq.vqgan import VQGAN, VQGANConfig
from lanternpp.nn.checkpoints import CONFIG
from lanternpp.nn.sources import Source
from lanternpp.nn.stores import Store

PATCH, STEP, MOST = (
    16,
    2,
    4096,
)  # pixels of a code's side; codes of a step of Lumina's size; codes of its largest image
BEGIN, END_OF_TURN, DRAW, ROW_END = "<s>", "<reserved08706>", "<racm3:break>", "<reserved08799>"
REQUEST = "Generate an image of {size} according to the following prompt:\n{prompt}"  # Lumina's
VQ, NORM = r"model\.vqmodel\.", r"model\.layers\.\d+\.self_attn\.[qk]_norm\."
VQ_FILES = ("vqgan.safetensors", "vqgan.ckpt", "tokenizer/vqgan.safetensors", "tokenizer/vqgan.ckpt")
LUMINA, FIRST = "lumina", "IMGIMGAZ"


class Chameleon(OneVocabulary):
    """transformers' own `generate` forbids image tokens: it writes text alone.

    Here generation_mode="image" draws a square of codes, and `prefix_allowed_tokens_fn` any other format.
    """

    class_name, model_type = "ChameleonForConditionalGeneration", "chameleon"
    about = "Anole-7B and Lumina-mGPT-7B in transformers' layout"
    any_size = True
    lacking = (VQ,)
    vqgan: VQGAN | None  # of a model that `read` opened
    _reads = True  # whether the checkpoint has an encoder

    def __init__(self, model: Any, lumina: bool = False):
        mapping = model.model.vocabulary_mapping
        codes = [mapping.img2bpe[code] for code in sorted(mapping.img2bpe)]
        row_ends = [mapping.vocab_map[ROW_END]] if lumina else []
        super().__init__(model, model.model, codes, extras=row_ends, qk_norm=True)
        self.lumina, self.vqgan = lumina, None
        down = 2 ** (len(model.config.vq_config.channel_multiplier) - 1)
        self.count = (model.config.vq_config.resolution // down) ** 2

    @classmethod
    def claims(cls, source: Source) -> bool:
        """transformers' model type, with or without the suffix of those who trained it on."""
        return any(kind.lower().startswith("chameleon") for kind in source.kinds)

    @classmethod
    def opened(cls, source: Source, dtype: torch.dtype) -> Self:
        """With the vocabulary of its tokenizer, where its config has none, and the VQ decoder."""
        folder = folder_of(source)
        words = Text(folder).vocabulary()
        if FIRST not in words:
            raise InputError(
                f"{source.path} has no image tokens: it only writes text; Anole-7B and Lumina-mGPT-7B draw"
            )
        given = source.config.get("vocabulary_map") or words
        config = config_of(source, cls.class_name, vocabulary_map=given)
        vq = config.vq_config
        rows = source.shape("model.layers.0.self_attn.q_norm.weight", 2)[0]
        shared = rows != config.num_attention_heads
        model = opened(source, cls.class_name, config, dtype, (VQ, NORM) if shared else (VQ,))
        if shared:
            share_norms(model, source)
        lumina = shared or source.config.get("dialect") == LUMINA
        lumina = lumina or any("xllmx" in kind.lower() for kind in source.kinds)
        target = cls(model, lumina)
        check_codes(source.path, len(target.codes), source.path, vq.num_embeddings)
        shape = VQGANConfig(
            codes=vq.num_embeddings,
            dim=vq.embed_dim,
            latent=vq.latent_channels,
            channels=vq.base_channels,
            multiples=tuple(vq.channel_multiplier),
            blocks=vq.num_res_blocks + 1,
            attention=(vq.resolution >> len(vq.channel_multiplier) - 1) in (vq.attn_resolutions or ()),
            unit=False,
        )
        target.vqgan = read_decoder(source, folder, shape, dtype)
        target._reads = any(re.match(VQ + "encoder", name) for name in source.metas)
        return target

    @property
    def defaults(self) -> Mapping[str, Any]:  # type: ignore[override]
        """What their authors draw with."""
        if self.lumina:
            return {"cfg": 4.0, "top_k": min(2000, len(self.codes))}
        return {"cfg": 3.0, "temperature": 0.7, "top_p": 0.9}

    def raster_of(self, source: Source, size: str | None) -> Raster:
        """Anole's square; of Lumina any size, which its name says, as its config does not."""
        if self.lumina:
            called = re.search(r"Lumina-mGPT-\d+B-(\d+)", str(source.path.resolve()))
            given = size or str(source.config.get("size") or (called[1] if called else 768))
            return Raster.of(given, PATCH, True, MOST, STEP)
        side = round(self.count**0.5)
        pixels = side * PATCH
        if size not in (None, str(pixels), f"{pixels}x{pixels}"):
            raise InputError(f"size {size} cannot be drawn; this model draws {pixels}x{pixels} pixels alone")
        return Raster(side, side)

    def conditional(self, text: str) -> list[int]:
        """<s> request <reserved08706>, and what the image begins with."""
        raster, ids = self.raster, self.text
        if self.lumina and raster is not None:
            size = f"{raster.columns * PATCH}x{raster.rows * PATCH}"
            text = REQUEST.format(size=size, prompt=text)
        return [ids.id(BEGIN), *ids.ids(text), ids.id(END_OF_TURN), *self._begin()]

    def unconditional(self, text: str | None) -> list[int]:
        """What the image begins with alone; Anole's after <s>."""
        return self._begin() if self.lumina else [self.text.id(BEGIN), *self._begin()]

    def _begin(self) -> list[int]:
        raster = self.raster
        sides = (raster.rows, raster.columns) if self.lumina and raster is not None else ()
        return [self.text.id(DRAW), *(self.text.id(f"<reserved{8800 + n // STEP:05d}>") for n in sides)]

    @property
    def vq(self) -> Any:
        """The VQ decoder, or transformers' encoder of a model of the user's."""
        return self.model.model.vqmodel if self.vqgan is None else self.vqgan

    @property
    def latents(self) -> Tensor:
        """As they are."""
        book: Tensor = self.vq.quantize.embedding.weight if self.vqgan is None else self.vqgan.codebook
        return book

    def decoded(self, grid: Tensor) -> Tensor:
        """By the checkpoint's decoder."""
        images: Tensor = self.vq.draw(grid)
        return images

    def encoder(self) -> nn.Module | None:
        """transformers' encoder."""
        vq = self.model.model.vqmodel
        return nn.Sequential(vq.encoder, vq.quant_conv) if self._reads else None

    def save(self, folder: Path, store: Store) -> list[str]:
        """With its VQ decoder as the tokenizer."""
        self.model.config.dialect = LUMINA if self.lumina else "anole"
        parts = super().save(folder, store)
        save_tokenizer(self.vq, folder / "tokenizer", store)
        return [*parts, "tokenizer"]

    def adjust(self, arguments: dict[str, Any]) -> None:
        """A whole picture where the call names no other length."""
        given = (arguments, vars(arguments.get("generation_config") or object))
        if not any(each.get(name) for each in given for name in ("max_length", "max_new_tokens")):
            set_length(arguments, self.count)

    def format(self, call: Call) -> Format:
        """A square of codes, unless the call says otherwise."""
        plain = call.processors.allowed is None
        return Format.plain(min(self.count, call.room)) if plain else super().format(call)


def share_norms(model: Any, source: Source) -> None:
    """Give every head the norm of queries and keys of its group, of which a checkpoint keeps one row.

    There is a row per model-parallel rank of the pretraining (Alpha-VLLM/Chameleon_7B_mGPT, model card).
    """
    names = [name for name in source.metas if re.match(NORM, name)]
    for name, rows in source.tensors(names):
        own = model.get_parameter(name)
        pick = torch.arange(len(own)) * len(rows) // len(own)
        own.data = rows[pick].to(own.dtype)


def read_decoder(source: Source, folder: Path, shape: VQGANConfig, dtype: torch.dtype) -> VQGAN:
    """The VQ decoder: given, from the checkpoint, from a tokenizer folder of ours, or from a file beside the checkpoint."""
    given = source.given.get("tokenizer")
    if given is None and "model.vqmodel.decoder.conv_in.weight" in source.metas:
        return read_vqgan(source, shape, VQ, dtype)
    ours = folder.parent / "tokenizer"
    if given is None and (ours / CONFIG).is_file():
        return read_tokenizer(Source.open(ours), 0, dtype, "cpu")
    files = [Path(given)] if given else [folder / name for name in VQ_FILES]
    file = next((path for path in files if path.exists()), None)
    if file is None:
        raise InputError(
            f"{folder} has no VQ decoder: put the vqgan.ckpt of Chameleon's tokenizer folder there, "
            "or use lanternpp models convert MODEL OUT --vq FILE"
        )
    return read_vqgan(Source.open(file), shape, "", dtype)
