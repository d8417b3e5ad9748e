"""The decoder layers of a transformers model as a `Stack`, and its rotary embeddings as a table.

The class of a layer says where its norms are and which channels rotation pairs. Everything else is read off its modules; a change
of what the modules compute (an adapter, a hook, a quantised weight) is rejected with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from lanternpp.errors import InputError
from lanternpp.nn.decoder import HeadScale, Stack, StackLayer

BEFORE = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
AFTER = {"attention_out_norm": "input_layernorm", "ffn_out_norm": "post_attention_layernorm"}
BOTH = {**BEFORE, "attention_out_norm": "post_self_attn_layernorm", "ffn_out_norm": "post_mlp_layernorm"}


@dataclass(frozen=True)
class _Form:
    """Names of the norms in a class of layers, by the field of `StackLayer`, and the differences of the class from Llama."""

    norms: Mapping[str, str]
    interleaved: bool = False  # rotation pairs neighbouring channels
    norm_offset: float = 0.0  # added to the weights of norms


# By the name of the layers' class, less `DecoderLayer`.
FORMS: dict[str, _Form] = {
    **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3", "Emu3", "Chameleon"), _Form(BEFORE)),
    "ChameleonSwin": _Form(AFTER),
    "Gemma": _Form(BEFORE, norm_offset=1.0),
    "Glm": _Form(BEFORE, interleaved=True),
    "Glm4": _Form(BOTH, interleaved=True),
    "GlmImageText": _Form(BOTH),
}
GATES: dict[type, Literal["silu", "gelu_tanh"]] = {
    nn.SiLU: "silu",
    SiLUActivation: "silu",
    GELUTanh: "gelu_tanh",
}
ROPES = ("default", "linear", "yarn", "llama3")  # rotations that do not change with the length of a sequence
# Why layers cannot be computed where this field of their config has a value.
REASONS = {
    "sliding_window": "its attention sees a window of the last tokens alone",
    "attn_logit_softcapping": "it caps attention scores",
    "num_experts": "they are mixtures of experts",
    "num_local_experts": "they are mixtures of experts",
    "n_routed_experts": "they are mixtures of experts",
    "use_bidirectional_attention": "its attention is not causal",
}
LIBRARY_MODULES = (
    "transformers.models.",
    "transformers.activations",
    "torch.nn.modules.activation",
    "torch.nn.modules.dropout",
)
CHILDREN = {
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"},
    "mlp": {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"},
}


def stack_of(body: nn.Module) -> Stack:
    """Describe the layers and the final norm of a transformers model, without a copy of its weights.

    body: the module that has `layers`, `norm`, `rotary_emb` and a config. Raises InputError with the reason where a `Stack`
    cannot describe these, or weights are not plain tensors in the memory of the CPU.
    """
    config: Any = body.config
    layers: list[Any] = list(body.get_submodule("layers").children())
    for field, reason in REASONS.items():
        if getattr(config, field, None):
            _reject(reason)
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        _reject("they differ in what their attention sees")
    form = _form(layers)
    for name, module in body.named_modules():
        if name.startswith("layers.") or name in ("", "norm"):
            _check_module(name or "the model", module)
    if len(layers) != config.num_hidden_layers:
        _reject(f"there are {len(layers)} and its config says {config.num_hidden_layers}")
    if len({_shape(layer, form) for layer in layers}) > 1:
        _reject("they differ in their sizes, their gates or the epsilon of their norms")
    head_dim, hidden, scale, gate, eps = _shape(layers[0], form)
    attention, norm = layers[0].self_attn, body.get_submodule("norm")
    qk_norm = getattr(attention, "q_norm", None)
    if gate not in GATES:
        _reject(f"their gate is {gate.__name__}")
    if _eps(norm) != eps:
        _reject("the epsilon of the last norm is another than theirs")
    return Stack(
        layers=[_layer(layer, form, head_dim) for layer in layers],
        norm=_scale(norm, form),
        dim=attention.q_proj.in_features,
        heads=attention.q_proj.out_features // head_dim,
        kv_heads=attention.k_proj.out_features // head_dim,
        head_dim=head_dim,
        hidden=hidden,
        eps=eps,
        qk_norm="none" if qk_norm is None else "layer" if isinstance(qk_norm, nn.LayerNorm) else "rms",
        qk_eps=1e-5 if qk_norm is None else _eps(qk_norm),
        gate=GATES[gate],
        scale=None if scale == head_dim**-0.5 else scale,
        qk_order=_qk_order(head_dim, _num_rotated(body), form.interleaved),
    )


def rotary_table(body: nn.Module, head_dim: int, positions: Tensor) -> Tensor:
    """Return the rotations of a model's `rotary_emb`, for `rotate`, [P, 2, head_dim] in float32.

    positions: `position_ids` of one row, [1, P], or [3, 1, P] where a token has three positions. Channels are in the
    order of the stack's `qk_order`; channels that the model does not rotate have cosine 1 and sine 0.
    """
    cos, sin = body.get_submodule("rotary_emb")(torch.zeros(1, device=positions.device), positions)
    half = cos.shape[-1] // 2
    # The second half of the channels repeats the first: [P, half].
    cos, sin = cos[0, :, :half].float(), sin[0, :, :half].float()
    unrotated = (len(cos), head_dim // 2 - half)
    cos = torch.cat((cos, cos.new_ones(unrotated)), 1)  # [P, head_dim / 2]
    sin = torch.cat((sin, sin.new_zeros(unrotated)), 1)
    return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1)


def _reject(reason: str) -> NoReturn:
    raise InputError(f"the layers of this model stay with PyTorch: {reason}")


def _form(layers: list[Any]) -> _Form:
    kind = type(layers[0]) if len({type(layer) for layer in layers}) == 1 else None
    if kind is None:
        _reject("they are of several classes")
    form = FORMS.get(kind.__name__.removesuffix("DecoderLayer"))
    if form is None or not kind.__module__.startswith("transformers.models."):
        _reject(f"{kind.__name__} is not known; known are those of {', '.join(FORMS)}")
    expected = {*CHILDREN, *form.norms.values(), "dropout"}
    for layer in layers:
        unexpected = layer._modules.keys() - expected
        for name, children in CHILDREN.items():
            unexpected |= layer._modules[name]._modules.keys() - children
        if unexpected:
            _reject(f"they have further modules: {', '.join(sorted(unexpected))}")
    return form


def _check_module(name: str, module: nn.Module) -> None:
    """Reject a module whose computation differs from its class's, or whose weights are no plain tensors on the CPU."""
    if module.training:
        _reject("it is in training mode; call model.eval()")
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    # Hooks of transformers itself only record outputs for callers that ask for them.
    hooked = any(not hook.__module__.startswith("transformers.utils.") for hook in hooks)
    if hooked or "forward" in vars(module):
        _reject(f"{name} has hooks or another forward, as of offloaded or distributed weights")
    is_linear, from_library = type(module) is nn.Linear, type(module).__module__.startswith(LIBRARY_MODULES)
    if not (is_linear if name.endswith("_proj") else from_library):
        _reject(f"{name} is a {type(module).__name__}, as with adapters or quantised weights")
    for weight in module.parameters(recurse=False):
        if type(weight) is not nn.Parameter or type(weight.data) is not Tensor or weight.element_size() < 2:
            _reject(
                f"the weight of {name} is a {type(weight.data).__name__} of {weight.dtype}, as quantised ones are"
            )
        if weight.device.type != "cpu":
            location = "not in memory (offloaded)" if weight.is_meta else f"on {weight.device}"
            _reject(f"weights are {location}")


def _layer(layer: Any, form: _Form, head_dim: int) -> StackLayer:
    attention, mlp = layer.self_attn, layer.mlp
    fused = hasattr(mlp, "gate_up_proj")
    return StackLayer(
        qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
        out=attention.o_proj,
        gate_up=(mlp.gate_up_proj,) if fused else (mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
        q_norm=_head_scale(attention, "q", head_dim),
        k_norm=_head_scale(attention, "k", head_dim),
        **{field: _scale(norm, form) for field, norm in _norms(form, layer).items()},
    )


def _norms(form: _Form, layer: nn.Module) -> dict[str, nn.Module]:
    return {field: layer.get_submodule(name) for field, name in form.norms.items()}


def _scale(norm: nn.Module, form: _Form) -> Tensor:
    """Return the factors of an RMSNorm, [dim]."""
    weight: Tensor = norm.weight.detach()  # type: ignore[operator]
    return weight.float() + form.norm_offset if form.norm_offset else weight


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _head_scale(attention: Any, part: str, head_dim: int) -> HeadScale | None:
    """Return factors and offsets of the norm of queries ("q") or keys ("k"), [heads, d] each; None where there is no norm."""
    norm = getattr(attention, f"{part}_norm", None)
    if norm is None:
        return None
    heads = getattr(attention, f"{part}_proj").out_features // head_dim
    weight, bias = norm.weight.detach(), getattr(norm, "bias", None)
    return weight.expand(heads, -1), None if bias is None else bias.detach().expand(heads, -1)


def _shape(layer: Any, form: _Form) -> tuple[int, int, float, type, float]:
    """Return channels of a head, hidden channels, scale of the scores, class of the gate and epsilon, nan where norms differ."""
    attention, mlp = layer.self_attn, layer.mlp
    gate = type(mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn)
    epsilons = {_eps(norm) for norm in _norms(form, layer).values()}
    eps = epsilons.pop() if len(epsilons) == 1 else nan
    return int(attention.head_dim), int(mlp.down_proj.in_features), float(attention.scaling), gate, eps


def _num_rotated(body: nn.Module) -> int:
    """Return the number of rotated channels of a head, which are its first ones."""
    rotary: Any = body.get_submodule("rotary_emb")
    if rotary.rope_type not in ROPES:
        _reject(f"rotary embeddings of type {rotary.rope_type!r} change with the length of a sequence")
    return 2 * int(rotary.inv_freq.numel())


def _qk_order(head_dim: int, num_rotated: int, interleaved: bool) -> Tensor | None:
    """Return `Stack.qk_order`, which pairs channels half against half: rotated channels first, then the others."""
    if num_rotated == head_dim and not interleaved:
        return None
    rotated, unrotated = torch.arange(num_rotated), torch.arange(num_rotated, head_dim)
    pairs = rotated.view(-1, 2).T if interleaved else rotated.view(2, -1)  # [2, pairs]
    return torch.cat((pairs, unrotated.view(2, -1)), 1).flatten()
