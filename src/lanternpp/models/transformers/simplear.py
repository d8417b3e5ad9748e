"""SimpleAR (arXiv 2504.11455): Qwen2 over text and the codes of NVIDIA's Cosmos tokenizer, 64 x 64 of 64,000, 1024 px.

A prompt is <|t2i|> "A highly realistic image of " text <|soi|>; the unconditional branch has a negative prompt in its place
(wdrink/SimpleAR, generate.py, which draws squares of 256 to 1024 px with guidance 6). There any token may be drawn and tokens of
text count as the first code; here they are never drawn. The decoder of Cosmos-1.0-Tokenizer-DV8x16x16 is published as TorchScript,
which runs code: its weights are read from a safetensors file that users make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from lanternpp.models.transformers.beside import LanguageModel
from lanternpp.models.vq.cosmos import read_cosmos
from lanternpp.models.vq.vqgan import VQGAN
from lanternpp.nn.sources import Source

REQUEST = "A highly realistic image of {prompt}"
NEGATIVE = (
    "An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth, bad eyes, "
    "bad limbs, distortion"
)


def fsq_points(levels: Sequence[int]) -> Tensor:
    """Return the points [prod(levels), C] of finite scalar quantisation (arXiv 2309.15505); the first number changes fastest."""
    axes = [(torch.arange(n) - n // 2) / (n // 2) for n in reversed(levels)]
    return torch.cartesian_prod(*axes).view(-1, len(levels)).flip(1)


class SimpleAR(LanguageModel):
    """A Qwen2 with 64,000 more tokens, which have no codebook: near codes are near points on the quantiser's grid."""

    class_name, model_type = "Qwen2ForCausalLM", "qwen2"
    about = "SimpleAR 0.5B and 1.5B, a Qwen2ForCausalLM of 215672 tokens"
    any_size = True
    defaults = {"cfg": 6.0}  # noqa: RUF012
    request, null_request = ("<|t2i|>", REQUEST, "<|soi|>"), ("<|t2i|>", NEGATIVE, "<|soi|>")
    text_tokens, levels, sides = 151_672, (8, 8, 8, 5, 5, 5), (64, 48, 32, 16)
    vq_files = ("vq_cosmos.safetensors",)
    vq_hint = "; docs/models.md says how to make it of Cosmos' decoder.jit"

    def tokenizer_in(self, source: Source, dtype: torch.dtype) -> VQGAN:
        """Read the decoder of NVIDIA's weights, or of a folder of ours."""
        return read_cosmos(source, fsq_points(self.levels), dtype)

    @cached_property
    def latents(self) -> Tensor:
        """[codes, C] the points of the quantiser's grid, in the order of the codes."""
        return fsq_points(self.levels).to(self.device)
