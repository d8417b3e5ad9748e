"""Tiny random bodies of language models by transformers' own classes, one for every kind of layer that a `Stack` describes."""

from __future__ import annotations

from typing import Any

from helpers.families import model_of

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


CHAMELEON = {
    "vq_config": {
        "embed_dim": 4,
        "num_embeddings": 8,
        "latent_channels": 8,
        "base_channels": 32,
        "channel_multiplier": [1],
        "num_res_blocks": 1,
        "resolution": 16,
    },
    "vocabulary_map": {"<image>": 30, "IMGIMGA": 31},
}
GRID_POSITIONS = {
    "vision_vocab_size": 20,
    "eos_token_id": 1,
    "rope_parameters": PARTIAL | {"mrope_section": [2, 1, 1]},
}
WIDE = PARTIAL | {"partial_rotary_factor": 0.48, "mrope_section": [8, 8, 8]}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaModel", {}),
    "llama, heads of 100": ("LlamaModel", {"head_dim": 100}),
    "llama, biases": ("LlamaModel", {"attention_bias": True, "mlp_bias": True}),
    "llama, yarn": ("LlamaModel", {"rope_parameters": YARN}),
    "llama, llama3": ("LlamaModel", {"rope_parameters": LLAMA3, "num_key_value_heads": 4}),
    "mistral": ("MistralModel", {"sliding_window": None}),
    "qwen2": ("Qwen2Model", {}),
    "qwen3": ("Qwen3Model", {"head_dim": 24}),
    "gemma": ("GemmaModel", {"head_dim": 256}),
    "glm": ("GlmModel", {"head_dim": 16, "attention_bias": True, "rope_parameters": PARTIAL}),
    "glm4": ("Glm4Model", {"head_dim": 24, "rope_parameters": PARTIAL}),
    "emu3": ("Emu3TextModel", {}),
    "chameleon": ("ChameleonModel", CHAMELEON),
    "chameleon, swin": ("ChameleonModel", CHAMELEON | {"swin_norm": True}),
    "glm-image": ("GlmImageTextModel", GRID_POSITIONS),
    "glm-image, heads of 100": (
        "GlmImageTextModel",
        GRID_POSITIONS | {"head_dim": 100, "rope_parameters": WIDE},
    ),
}


def body(name: str) -> Any:
    """The body of that name, of random weights."""
    kind, changes = BODIES[name]
    return model_of(kind, **SIZES | changes).requires_grad_(False)
