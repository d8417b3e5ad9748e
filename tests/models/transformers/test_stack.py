"""A transformers model's layers as a `Stack` compute what the model computes; what a stack does not describe is rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.bodies import BODIES, SIZES, body
from helpers.stacks import StackPasses
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2Model,
    MistralConfig,
    MistralModel,
    MixtralConfig,
    MixtralModel,
    PhiConfig,
    PhiModel,
)

from lanternpp.engine.cache import Cache
from lanternpp.errors import InputError
from lanternpp.models.transformers.stack import rotary_table, stack_of
from lanternpp.nn.decoder import DecoderConfig
from lanternpp.nn.stack import Stack


def passes(stack: Stack, table: Tensor, x: Tensor, prompt: int) -> Tensor:
    """x [R, T, D] in a prefill of `prompt` slots and a step for every further one."""
    run = StackPasses(stack, table)
    rows = len(x)
    config = DecoderConfig(
        stack.dim, len(stack.layers), stack.heads, stack.hidden, stack.kv_heads, head_dim=stack.head_dim
    )
    cache = Cache(config, rows, x.shape[1], x)
    first = cache.rows(torch.arange(rows), torch.zeros(rows, dtype=torch.int64), prompt)
    found = [first.computed(lambda kv: run(x[:, :prompt], first.nodes(), kv))]
    one = torch.ones(rows, 1, 1, dtype=torch.bool)
    for place in range(prompt, x.shape[1]):
        nodes = cache.nodes(torch.zeros(rows, 1, dtype=torch.int64), one)
        found.append(run(x[:, place : place + 1], nodes, cache.kv))
        cache.used += 1
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", BODIES)
@torch.inference_mode()
def test_a_stack_computes_what_the_model_computes(name: str) -> None:
    model = body(name)
    stack = stack_of(model)
    positions = torch.arange(20)[None]
    if name.startswith("glm-image"):  # a prompt, then rows of a grid
        positions = torch.stack([positions, positions // 4 + 3, positions % 4 + 3])
        positions[:, :, :7] = torch.arange(7)
    x = torch.randn(2, 20, stack.dim)
    cache, given = DynamicCache(), positions.expand(*positions.shape[:-2], 2, -1)
    expected = [
        model(inputs_embeds=x[:, part], position_ids=given[..., part], past_key_values=cache, use_cache=True)
        for part in (slice(0, 15), *(slice(place, place + 1) for place in range(15, 20)))
    ]
    found = passes(stack, rotary_table(model, stack.head_dim, positions), x, 15)
    usual = torch.cat([each.last_hidden_state for each in expected], 1)
    assert usual.abs().max() > 1
    assert (found - usual).abs().max() <= 1e-5


def trained(model: Any) -> None:
    model.layers[1].train()


def hooked(model: Any) -> None:
    model.layers[1].mlp.register_forward_hook(lambda module, args, output: 2 * output)


def adapted(model: Any) -> None:
    class LoraLinear(nn.Module):
        def __init__(self, base: nn.Linear):
            super().__init__()
            self.base, self.down, self.up = base, nn.Linear(64, 4), nn.Linear(4, 32)

    attention = model.layers[0].self_attn
    attention.v_proj = LoraLinear(attention.v_proj).eval()


def quantised(model: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def offloaded(model: Any) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, torch.device("cpu"))


def without_weights(model: Any) -> None:
    model.layers[2].to("meta")


def another_norm(model: Any) -> None:
    model.layers[0].input_layernorm = nn.RMSNorm(64).eval()


def another_gate(model: Any) -> None:
    for layer in model.layers:
        layer.mlp.act_fn = nn.ReLU().eval()


def a_replaced_forward(model: Any) -> None:
    model.forward = lambda **given: None


def another_last_norm(model: Any) -> None:
    model.norm.variance_epsilon = 0.1


def a_layer_of_another_gate(model: Any) -> None:
    model.layers[2].mlp.act_fn = nn.ReLU().eval()


def an_added_module(model: Any) -> None:
    model.layers[2].self_attn.gate = nn.Linear(64, 4).eval()


def an_own_class(model: Any) -> None:
    class MyDecoderLayer(type(model.layers[0])):  # type: ignore[misc]
        pass

    for layer in model.layers:
        layer.__class__ = MyDecoderLayer


def another_epsilon(model: Any) -> None:
    model.layers[1].input_layernorm.variance_epsilon = 0.1


def fewer_layers(model: Any) -> None:
    model.layers = model.layers[:2]


def a_window(model: Any) -> None:
    model.config.sliding_window = 8


def a_dynamic_rope(model: Any) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    other = BODIES["llama"]()
    other.config.rope_parameters = rope
    model.rotary_emb = type(model.rotary_emb)(other.config)


REJECTED: dict[Callable[[Any], None], str] = {
    trained: "training mode",
    hooked: r"layers\.1\.mlp has hooks",
    adapted: r"v_proj is a LoraLinear",
    quantised: "as quantised ones are",
    offloaded: "offloaded",
    without_weights: "not in memory",
    another_norm: "input_layernorm is a RMSNorm",
    another_gate: "their gate is ReLU",
    a_replaced_forward: "the model has hooks or another forward",
    another_last_norm: "epsilon of the last norm",
    a_layer_of_another_gate: "differ in their sizes, their gates",
    an_added_module: "further modules: gate",
    an_own_class: "MyDecoderLayer is not known",
    another_epsilon: "epsilon",
    fewer_layers: "there are 2 and its config says 3",
    a_window: "window",
    a_dynamic_rope: "'dynamic' change with the length",
}


@pytest.mark.parametrize("change", REJECTED, ids=lambda change: change.__name__)
def test_what_a_stack_does_not_describe_is_rejected_with_the_reason(change: Callable[[Any], None]) -> None:
    model = body("llama")
    change(model)
    with pytest.raises(InputError, match=f"stay with PyTorch: .*({REJECTED[change]})"):
        stack_of(model)


def test_models_that_are_no_stack_are_rejected_with_the_reason() -> None:
    sizes = {key: SIZES[key] for key in SIZES if key != "pad_token_id"}
    capped = Gemma2Model(Gemma2Config(**sizes, head_dim=16)).eval()
    window = MistralModel(MistralConfig(**sizes)).eval()
    mixture = MixtralModel(MixtralConfig(**sizes, num_local_experts=2)).eval()
    phi = PhiModel(PhiConfig(**sizes)).eval()
    reasons = {capped: "window", window: "window", mixture: "mixtures", phi: "PhiDecoderLayer is not known"}
    for model, reason in reasons.items():
        with pytest.raises(InputError, match=f"stay with PyTorch: .*({reason})"):
            stack_of(model)


def test_hooks_of_transformers_that_record_outputs_change_nothing() -> None:
    model = body("llama")
    model(inputs_embeds=torch.randn(1, 3, 64), output_hidden_states=True)
    assert any(layer._forward_hooks for layer in model.layers)
    assert len(stack_of(model).layers) == 3
