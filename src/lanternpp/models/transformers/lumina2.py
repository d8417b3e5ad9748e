"""Lumina-mGPT 2.0 (arXiv 2507.17801): Chameleon's layers, trained from scratch over Qwen2's words and MoVQGAN's codes of 8 px.

A prompt is that of Lumina-mGPT; codes are the tokens <MOVQGAN...>. The demo draws 768 px, 96 x 96
codes, with guidance 4 and top-k 4096 (Alpha-VLLM/Lumina-mGPT-2.0, generate_examples/generate.py). The tokenizer is
movqgan_270M.ckpt of ai-forever/MoVQGAN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lanternpp.models.transformers.adapter import TransformersTarget
from lanternpp.models.transformers.chameleon import Chameleon
from lanternpp.models.transformers.lumina import Lumina
from lanternpp.nn.sources import Source

CODE = "<MOVQGAN"  # a code's token begins with it


class Lumina2(Lumina):
    """A Lumina with another vocabulary and tokenizer."""

    about = "Lumina-mGPT 2.0, as its authors publish it or in transformers' layout"
    vq_files = ("movqgan_270M.ckpt", "movqgan_270M.safetensors", "movqgan/270M/movqgan_270M.ckpt")
    vq_hub = "ai-forever/MoVQGAN/movqgan_270M.ckpt"
    max_codes, step, pixels_per_code = 9216, 4, 8
    defaults = {"cfg": 4.0, "top_k": 4096}  # noqa: RUF012

    @classmethod
    def claims(cls, source: Source) -> bool:
        """Return whether a checkpoint is a Chameleon with codes of MoVQGAN in its vocabulary."""
        words = source.config.get("vocabulary_map")
        return Chameleon.claims(source) and isinstance(words, dict) and bool(cls.image_tokens(words))

    @staticmethod
    def image_tokens(words: Mapping[str, int]) -> list[int]:
        """Return the tokens of codes of a vocabulary, which lie in the order of the codes."""
        return sorted(token for name, token in words.items() if name.startswith(CODE))

    def __init__(self, model: Any):
        super().__init__(model)
        vars(self)["vq"] = None  # the tokenizer in transformers' class is Chameleon's


def adapter_of(model: Any) -> TransformersTarget:
    """Make the adapter of a Chameleon that the user opened."""
    codes = Lumina2.image_tokens(model.model.vocabulary_mapping.vocab_map)
    return Lumina2(model) if codes else Chameleon(model)
