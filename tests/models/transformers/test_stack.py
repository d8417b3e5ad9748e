"""A transformers model's layers as a `Stack` compute what the model computes; what a stack does not describe is rejected."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from helpers.bodies import BODIES, SIZES, body
from helpers.families import model_of
from helpers.refusals import rejects
from helpers.stacks import StackPasses
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lanternpp.engine.cache import Cache
from lanternpp.models.transformers.stack import rotary_table, stack_of
from lanternpp.nn.decoder import Stack


def passes(stack: Stack, table: Tensor, x: Tensor, prompt: int) -> Tensor:
    """x [R, T, D] in a prefill of `prompt` slots and a step for every further one."""
    run = StackPasses(stack, table)
    rows = len(x)
    cache = Cache(stack.config, rows, x.shape[1], x)
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
    if not name.startswith("qwen"):  # which reads it
        model.config.layer_types = None  # as some configs have it
    stack = stack_of(model)
    positions = torch.arange(20)[None]
    if name.startswith("glm-image"):  # a prompt, then rows of a grid
        positions = torch.stack([positions, positions // 4 + 3, positions % 4 + 3])
        positions[:, :, :7] = torch.arange(7)
    x = torch.randn(2, 20, stack.config.dim)
    given = positions.expand(*positions.shape[:-2], 2, -1)
    found = passes(stack, rotary_table(model, stack.config.head_dim, positions), x, 15)
    usual = model(inputs_embeds=x, position_ids=given, use_cache=False).last_hidden_state
    assert usual.abs().max() > 1
    assert (found - usual).abs().max() <= 1e-5


class LoraLinear(nn.Module):
    """A linear layer with an adapter."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(64, 4), nn.Linear(4, 32)


class OwnLayer(LlamaDecoderLayer):
    """A layer of the user's class."""


def quantised(model: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def offloaded(model: Any) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, torch.device("cpu"))


def a_dynamic_rope(model: Any) -> None:
    other = body("llama")
    other.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model.rotary_emb = type(model.rotary_emb)(other.config)


def with_part(path: str, value: Callable[[Any], Any] | Any) -> Callable[[Any], None]:
    """A model with another part, module or number at a path; value: it, or a function from the part that was there."""

    def change(model: Any) -> None:
        *above, name = path.split(".")
        owner = reduce(getattr, above, model)
        found = value(getattr(owner, name)) if callable(value) else value
        setattr(owner, name, found.eval() if isinstance(found, nn.Module) else found)

    return change


REJECTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "trained": (lambda model: model.layers[1].train(), "training mode"),
    "hooked": (
        lambda model: model.layers[1].mlp.register_forward_hook(lambda module, args, output: 2 * output),
        r"layers\.1\.mlp has hooks",
    ),
    "adapted": (with_part("layers.0.self_attn.v_proj", LoraLinear), r"v_proj is a LoraLinear"),
    "quantised": (quantised, "as quantised ones are"),
    "offloaded": (offloaded, "offloaded"),
    "without weights": (lambda model: model.layers[2].to("meta"), "not in memory"),
    "another norm": (
        with_part("layers.0.input_layernorm", lambda _: nn.RMSNorm(64)),
        "input_layernorm is a RMSNorm",
    ),
    "a replaced forward": (
        lambda model: setattr(model, "forward", lambda **given: None),
        "the model has hooks or another forward",
    ),
    "another last norm": (with_part("norm.variance_epsilon", 0.1), "variance_epsilon of norm is another"),
    "a scale of the scores": (
        with_part("layers.1.self_attn.scaling", 0.1),
        r"scaling of layers\.1\.self_attn",
    ),
    "a layer of another gate": (with_part("layers.2.mlp.act_fn", lambda _: nn.ReLU()), "act_fn is a ReLU"),
    "an added module": (
        lambda model: model.layers[2].self_attn.register_module("gate", nn.Linear(64, 4).eval()),
        r"further modules: layers\.2\.self_attn\.gate",
    ),
    "an own class": (
        lambda model: [setattr(layer, "__class__", OwnLayer) for layer in model.layers],
        "OwnLayer is not known",
    ),
    "fewer layers": (with_part("layers", lambda layers: layers[:2]), "there are 2 and its config says 3"),
    "a window": (with_part("config.sliding_window", 8), "window"),
    "a dynamic rope": (a_dynamic_rope, "'dynamic' change with the length"),
}


@pytest.mark.parametrize(("change", "said"), REJECTED.values(), ids=REJECTED)
def test_changed_models_are_rejected_with_the_reason(change: Callable[[Any], Any], said: str) -> None:
    model = body("llama")
    change(model)
    rejects(f"stay with PyTorch: .*({said})", stack_of, model)


def test_other_models_are_rejected_with_the_reason() -> None:
    capped = model_of("Gemma2Model", **SIZES, head_dim=16)
    window = model_of("MistralModel", **SIZES)
    mixture = model_of("MixtralModel", **SIZES, num_local_experts=2)
    relu = model_of("LlamaModel", **SIZES, hidden_act="relu")
    reasons = {
        capped: "Gemma2DecoderLayer is not known",
        window: "window",
        mixture: "MixtralDecoderLayer is not known",
        relu: "their gate is ReLU",
    }
    for model, reason in reasons.items():
        rejects(f"stay with PyTorch: .*({reason})", stack_of, model)


def test_hooks_of_transformers_that_record_outputs_change_nothing() -> None:
    model = body("llama")
    model(inputs_embeds=torch.randn(1, 3, 64), output_hidden_states=True)
    assert any(layer._forward_hooks for layer in model.layers)
    assert len(stack_of(model).layers) == 3
