"""Chameleon (arXiv 2405.09818) taught to draw, as Anole-7B (2407.06135): 32 x 32 codes, 512 px.

A prompt of leloy/Anole-7b-v0.1-hf is <s> text <reserved08706> <racm3:break>, and the unconditional branch <s> <racm3:break>
(facebookresearch/chameleon, inference/chameleon.py, which draws with guidance 3, temperature 0.7 and top-p 0.9). transformers' class
has no VQ decoder: its weights are in the checkpoint (Anole's) or in Meta's `vqgan.ckpt`, which Alpha-VLLM publish.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from lanternpp.errors import InputError
from lanternpp.models.transformers.beside import TokenizerBeside
from lanternpp.models.transformers.opening import Text
from lanternpp.nn.checkpoints import Store
from lanternpp.nn.sources import Source

BEGIN, END_OF_TURN, DRAW = "<s>", "<reserved08706>", "<racm3:break>"
VQ = "model.vqmodel."
IMAGE, DIGITS = re.compile("IMGIMG([A-J]+)Z"), str.maketrans("ABCDEFGHIJ", "0123456789")


class Chameleon(TokenizerBeside):
    """transformers' own `generate` forbids image tokens, and so writes text alone.

    Here generation_mode="image" draws a square of codes, and `prefix_allowed_tokens_fn` any other format.
    """

    class_name, model_type = "ChameleonForConditionalGeneration", "chameleon"
    about = "Anole-7B in transformers' layout"
    request, null_request = (BEGIN, "{prompt}", END_OF_TURN, DRAW), (BEGIN, DRAW)
    any_size = True
    by_forward = False
    defaults = {"cfg": 3.0, "temperature": 0.7, "top_p": 0.9}  # noqa: RUF012
    optional: ClassVar[tuple[str, ...]] = (VQ,)
    vq_prefix = VQ
    dialect: ClassVar[str] = "anole"  # in a config.json of ours
    vq_files: ClassVar[tuple[str, ...]] = (
        *("vqgan.ckpt", "vqgan.safetensors", "tokenizer/vqgan.ckpt", "tokenizer/vqgan.safetensors"),
    )
    vq_hub = "Alpha-VLLM/Chameleon_7B_mGPT/original_tokenizers/vqgan.ckpt"

    def __init__(self, model: Any, row_end: int | None = None):
        codes = self.image_tokens(model.model.vocabulary_mapping.vocab_map)
        super().__init__(model, model.model, codes, row_end)
        config = model.config.vq_config
        self.sides = () if row_end else (config.resolution // 2 ** (len(config.channel_multiplier) - 1),)

    @classmethod
    def claims(cls, source: Source) -> bool:
        """Return whether a checkpoint has transformers' model type, with or without the suffix of a fine-tuned model."""
        return any(kind.lower().startswith("chameleon") for kind in source.kinds)

    @staticmethod
    def image_tokens(words: Mapping[str, int]) -> list[int]:
        """Return the tokens of codes of a vocabulary, in order; their names spell numbers with letters for digits."""
        matches = ((IMAGE.fullmatch(name), token) for name, token in words.items())
        numbered = [(int(match[1].translate(DIGITS)), token) for match, token in matches if match]
        return [token for _, token in sorted(numbered)]

    @classmethod
    def fields_of(cls, source: Source) -> Mapping[str, Any]:
        """Return the vocabulary of the checkpoint's config, or else of its tokenizer."""
        words = Text(source.folder).vocabulary()
        words = source.config.get("vocabulary_map") or words
        if not cls.image_tokens(words):
            raise InputError(
                f"{source.path} has no image tokens: it only writes text; Anole-7B and Lumina-mGPT-7B draw"
            )
        return {"vocabulary_map": words}

    def read_vq(self, source: Source, dtype: torch.dtype) -> None:
        """Read the tokenizer, and remove transformers' encoder where the checkpoint has none."""
        super().read_vq(source, dtype)
        if not any(name.startswith(f"{VQ}encoder") for name in source.metas):
            self.model.model.vqmodel = None

    def save(self, folder: Path, store: Store) -> list[str]:
        """Write model and tokenizer, with the name of the dialect in the config."""
        self.model.config.dialect = self.dialect
        return super().save(folder, store)
