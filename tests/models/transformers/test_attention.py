"""Attention other than to all earlier tokens: computed, or rejected in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.refusals import rejects
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, MistralConfig
from transformers import MistralForCausalLM as Mistral

import lanternpp
from lanternpp.models.transformers import CLASSES
from lanternpp.models.transformers.beside import LanguageModel

TEXT, CODES = 20, 64  # tokens
SHAPE = {"vocab_size": TEXT + CODES, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}


class Sketch(LanguageModel):
    """A family for any class of a plain language model."""

    class_name, model_type, about = "MistralForCausalLM", "mistral", "a sketch"
    text_tokens, levels, sides = TEXT, (CODES,), (8,)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Mistral, Gemma2ForCausalLM, GPT2LMHeadModel):
        monkeypatch.setitem(CLASSES, kind.__name__, Sketch)


def mistral(**more: Any) -> Any:
    torch.manual_seed(0)
    return Mistral(MistralConfig(**SHAPE, **more)).double().eval()


def draw(model: Any) -> Tensor:
    """A greedy square of codes after a prompt."""
    codes = range(TEXT, TEXT + CODES)
    given = {"max_new_tokens": CODES, "do_sample": False, "pad_token_id": 0}
    return model.generate(
        torch.tensor([[1, 2, 3]]), prefix_allowed_tokens_fn=lambda row, ids: list(codes), **given
    )


@pytest.mark.parametrize(("window", "scaling"), [(None, 0.7), (4096, None)])
def test_a_scale_of_the_scores_and_a_window_of_all_tokens_are_computed(window, scaling) -> None:
    model = mistral(sliding_window=window)
    for layer in model.model.layers:
        layer.self_attn.scaling = scaling or layer.self_attn.scaling
    expected = draw(model)
    assert torch.equal(draw(lanternpp.accelerate(model)), expected)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: mistral(sliding_window=8), "sees the last 8 tokens alone"),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=16)).double().eval(), "caps scores"),
    ],
    ids=["window", "cap"],
)
def test_a_window_and_capped_scores_are_rejected(make, said) -> None:
    rejects(said, draw, lanternpp.accelerate(make()))


def test_a_class_with_other_modules_is_rejected() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=TEXT + CODES, n_embd=32, n_layer=1, n_head=2))
    rejects("GPT2LMHeadModel has other modules.*needs `layers`", lanternpp.accelerate, model)
