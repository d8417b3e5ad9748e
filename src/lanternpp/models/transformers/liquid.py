"""Liquid (arXiv 2412.04332): Gemma over text and the codes of Chameleon's VQGAN, 32 x 32 of 8,192, 512 px.

A prompt is <bos> text " Generate an image based on this description." <boi>, and the unconditional branch <bos> <unconditional>
<boi> (FoundationVision/Liquid, evaluation/inference_t2i.py, which draws with guidance 7, temperature 0.99, top-k 4096 and top-p
0.96, and never a token of text). Chameleon's `vqgan.ckpt` is not in the checkpoint.
"""

from __future__ import annotations

from lanternpp.models.transformers.beside import LanguageModel
from lanternpp.models.transformers.chameleon import Chameleon

REQUEST = "{prompt} Generate an image based on this description."


class Liquid(LanguageModel):
    """A Gemma with 8,192 more tokens."""

    class_name, model_type = "GemmaForCausalLM", "gemma"
    about = "Liquid-7B, a GemmaForCausalLM of 264192 tokens"
    defaults = {"cfg": 7.0, "temperature": 0.99, "top_k": 4096, "top_p": 0.96}  # noqa: RUF012
    request, null_request = ("<bos>", REQUEST, "<boi>"), ("<bos>", "<unconditional>", "<boi>")
    text_tokens, levels, sides = 256_000, (8192,), (32,)
    # Its config.json says "gelu", which meant the approximation when Gemma was published.
    fields = {"hidden_act": "gelu_pytorch_tanh"}  # noqa: RUF012
    vq_files, vq_hub = Chameleon.vq_files, Chameleon.vq_hub
