"""Models of transformers as targets: one adapter a family, whether lanternpp opened the model or the user did.

An adapter (`adapter.py`) says where a model keeps its layers, embeddings, head and codebook, how a prompt becomes tokens and
how codes become pixels. `decoder.py` runs the layers with a KV cache of ours, `stack.py` describes them to the kernels,
`opening.py` reads a checkpoint, `format.py` says which tokens may stand where, and `call.py` reads a call of `generate`.
"""

from __future__ import annotations

CLASSES = {
    "JanusForConditionalGeneration": "lanternpp.models.transformers.janus:Janus",
    "Emu3ForConditionalGeneration": "lanternpp.models.transformers.emu3:Emu3",
    "ChameleonForConditionalGeneration": "lanternpp.models.transformers.lumina2:adapter_of",
    "Qwen3ForCausalLM": "lanternpp.models.transformers.emu35:Emu35",
    "GemmaForCausalLM": "lanternpp.models.transformers.liquid:Liquid",
    "Qwen2ForCausalLM": "lanternpp.models.transformers.simplear:SimpleAR",
    "GlmImageForConditionalGeneration": "lanternpp.models.transformers.glm_image:GlmImage",
}
"""What makes the adapter of a model of each class of transformers."""
