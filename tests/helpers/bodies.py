"""Tiny random bodies of language models by transformers' own classes, one for every kind of layer that a `Stack` describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.chameleon.modeling_chameleon import ChameleonModel
from transformers.models.emu3.modeling_emu3 import Emu3TextModel
from transformers.models.glm_image.modeling_glm_image import GlmImageTextModel

from helpers.families import lively

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


def _auto(name: str, **changes: Any) -> Callable[[], nn.Module]:
    """A model by the name of its family."""

    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**SIZES | changes)
        return getattr(transformers, f"{name}Model")(config)

    return make


def _chameleon(**changes: Any) -> Callable[[], nn.Module]:
    vq = {
        "embed_dim": 4,
        "num_embeddings": 8,
        "latent_channels": 8,
        "base_channels": 32,
        "channel_multiplier": [1],
        "num_res_blocks": 1,
        "resolution": 16,
    }
    words = {"<image>": 30, "IMGIMGA": 31}
    fields = SIZES | {"vq_config": vq, "vocabulary_map": words} | changes
    return lambda: ChameleonModel(transformers.ChameleonConfig(**fields))


def _glm_image(**changes: Any) -> nn.Module:
    rope = PARTIAL | {"mrope_section": [2, 1, 1]}
    fields = SIZES | {"vision_vocab_size": 20, "rope_parameters": rope, "eos_token_id": 1} | changes
    return GlmImageTextModel(transformers.GlmImageConfig(text_config=fields).text_config)


def _emu3(**changes: Any) -> nn.Module:
    return Emu3TextModel(transformers.Emu3Config(text_config=SIZES | changes).text_config)


BODIES: dict[str, Callable[[], nn.Module]] = {
    "llama": _auto("Llama"),
    "llama, heads of 100": _auto("Llama", head_dim=100),
    "llama, biases": _auto("Llama", attention_bias=True, mlp_bias=True),
    "llama, yarn": _auto("Llama", rope_parameters=YARN),
    "llama, llama3": _auto("Llama", rope_parameters=LLAMA3, num_key_value_heads=4),
    "mistral": _auto("Mistral", sliding_window=None),
    "qwen2": _auto("Qwen2"),
    "qwen3": _auto("Qwen3", head_dim=24),
    "gemma": _auto("Gemma", head_dim=256),
    "glm": _auto("Glm", head_dim=16, attention_bias=True, rope_parameters=PARTIAL),
    "glm4": _auto("Glm4", head_dim=24, rope_parameters=PARTIAL),
    "emu3": _emu3,
    "chameleon": _chameleon(),
    "chameleon, swin": _chameleon(swin_norm=True),
    "glm-image": _glm_image,
    "glm-image, heads of 100": lambda: _glm_image(
        head_dim=100,
        rope_parameters=PARTIAL | {"partial_rotary_factor": 0.48, "mrope_section": [8, 8, 8]},
    ),
}


def body(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The body of that name, with weights that differ from those that it is made with, norms and biases too."""
    torch.manual_seed(0)
    made = BODIES[name]().eval()
    lively(made)
    if name == "gemma":  # whose norms add one
        for parameter in (p for n, p in made.named_parameters() if "norm" in n):
            parameter.data -= 1
    return made.to(dtype).requires_grad_(False)
