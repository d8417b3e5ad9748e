"""Liquid (arXiv 2412.04332): Gemma over text and the codes of Chameleon's VQGAN, 32 x 32 of 8,192, 512 px.

A prompt is <bos> text " Generate an image based on this description." <boi>, and the unconditional branch <bos> <unconditional>
<boi> (FoundationVision/Liquid, evaluation/inference_t2i.py, which draws with guidance 7, temperature 0.99, top-k 4096 and top-p
0.96, and never a token of text). Chameleon's `vqgan.ckpt` is not in the checkpoint.
"""

from __future__ import annotations

from lanternpp.models.transformers.beside import LanguageModel

BEGIN, NOTHING, DRAW = "<bos>", "<unconditional>", "<boi>"
REQUEST = "{prompt} Generate an image based on this description."


class Liquid(LanguageModel):
    """A Gemma with 8,192 more tokens."""

    class_name, model_type = "GemmaForCausalLM", "gemma"
    about = "Liquid-7B, a GemmaForCausalLM of 264192 tokens"
    recommended = {"cfg": 7.0, "temperature": 0.99, "top_k": 4096, "top_p": 0.96}  # noqa: RUF012
    draws_after, text_tokens, levels, sizes = DRAW, 256_000, (8192,), ("512",)
    # Its config.json says "gelu", which meant the approximation when Gemma was published.
    fields = {"hidden_act": "gelu_pytorch_tanh"}  # noqa: RUF012
    vq_files = ("vqgan.ckpt", "vqgan.safetensors")

    def conditional(self, text: str) -> list[int]:
        """Return the prompt, and the request that follows every prompt."""
        return [self.text.id(BEGIN), *self.text.ids(REQUEST.format(prompt=text)), self.text.id(DRAW)]

    def unconditional(self, text: str | None) -> list[int]:
        """Return the tokens with <unconditional> in place of a prompt."""
        return [self.text.id(token) for token in (BEGIN, NOTHING, DRAW)]
