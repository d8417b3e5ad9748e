"""The decoder layers of a transformers model as a `Stack`, and its rotary embeddings as a table.

A layer is known by its class: that says where its norms are and which channels rotation pairs. Everything else is read off its
modules, and whatever changes what they compute (an adapter, a hook, a quantised weight) is rejected with the reason.
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
    """Where a class of layers has its norms (field of `StackLayer`: module), and its differences from Llama."""

    norms: Mapping[str, str]
    interleaved: bool = False  # rotation pairs neighbouring channels
    norm_offset: float = 0.0  # added to the weights of norms


PLAIN = _Form(BEFORE)
FORMS: dict[str, _Form] = {
    **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3", "Emu3", "Chameleon"), PLAIN),
    "ChameleonSwin": _Form(AFTER),
    "Gemma": _Form(BEFORE, norm_offset=1.0),
    "Glm": _Form(BEFORE, interleaved=True),
    "Glm4": _Form(BOTH, interleaved=True),
    "GlmImageText": _Form(BOTH),
}
"""By the name of the layers' class, less `DecoderLayer`."""
GATES: dict[type, Literal["silu", "gelu_tanh"]] = {
    nn.SiLU: "silu",
    SiLUActivation: "silu",
    GELUTanh: "gelu_tanh",
}
ROPES = ("default", "linear", "yarn", "llama3")  # the same at any length
CONFIGS = {
    "sliding_window": "its attention sees a window of the last tokens alone",
    "attn_logit_softcapping": "it caps attention scores",
    "num_experts": "they are mixtures of experts",
    "num_local_experts": "they are mixtures of experts",
    "n_routed_experts": "they are mixtures of experts",
    "use_bidirectional_attention": "its attention is not causal",
}
"""Fields of a config that say why its layers cannot be computed, where they have a value."""
MODULES = (
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
    """The layers and the final norm of a transformers model, with its weights where they are.

    body: the module that has `layers`, `norm`, `rotary_emb` and a config. Raises InputError with the reason where these are
    not what a `Stack` describes, or weights are not plain tensors in the memory of the CPU.
    """
    config: Any = body.config
    layers: list[Any] = list(body.get_submodule("layers").children())
    for field, reason in CONFIGS.items():
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
    if len({_numbers(layer, form) for layer in layers}) > 1:
        _reject("they differ in their sizes, their gates or the epsilon of their norms")
    head_dim, hidden, scale, gate, eps = _numbers(layers[0], form)
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
        qk_order=_order(head_dim, _rotated(body), form.interleaved),
    )


def rotary_table(body: nn.Module, head_dim: int, positions: Tensor) -> Tensor:
    """The rotations of a model's `rotary_emb`, for `rotate`, [P, 2, head_dim] in float32.

    positions: `position_ids` of one row, [1, P], or [3, 1, P] where the model has three of them. Channels are in the
    order of the stack's `qk_order`; those that the model does not rotate have cosine 1 and sine 0.
    """
    cos, sin = body.get_submodule("rotary_emb")(torch.zeros(1, device=positions.device), positions)
    half = cos.shape[-1] // 2  # the second half is the same
    cos, sin = cos[0, :, :half].float(), sin[0, :, :half].float()
    rest = (len(cos), head_dim // 2 - half)
    cos, sin = torch.cat((cos, cos.new_ones(rest)), 1), torch.cat((sin, sin.new_zeros(rest)), 1)
    return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1)


def _reject(reason: str) -> NoReturn:
    raise InputError(f"the layers of this model stay with PyTorch: {reason}")


def _form(layers: list[Any]) -> _Form:
    kinds = {type(layer) for layer in layers}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        _reject("they are of several classes")
    form = FORMS.get(kind.__name__.removesuffix("DecoderLayer"))
    if form is None or not kind.__module__.startswith("transformers.models."):
        _reject(f"{kind.__name__} is not known; known are those of {', '.join(FORMS)}")
    known = {*CHILDREN, *form.norms.values(), "dropout"}
    for layer in layers:
        added = layer._modules.keys() - known
        for name, children in CHILDREN.items():
            added |= layer._modules[name]._modules.keys() - children
        if added:
            _reject(f"they have further modules: {', '.join(sorted(added))}")
    return form


def _check_module(name: str, module: nn.Module) -> None:
    """Reject a module that computes something else than its class does, or whose weights are no plain tensors on the CPU."""
    if module.training:
        _reject("it is in training mode; call model.eval()")
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    # transformers' own hooks record outputs for callers that ask for them
    if "forward" in vars(module) or any(
        not hook.__module__.startswith("transformers.utils.") for hook in hooks
    ):
        _reject(f"{name} has hooks or another forward, as of offloaded or distributed weights")
    own = nn.Linear if name.endswith("_proj") else None
    if not (type(module) is own or (own is None and type(module).__module__.startswith(MODULES))):
        _reject(f"{name} is a {type(module).__name__}, as with adapters or quantised weights")
    for weight in module._parameters.values():
        if weight is None:
            continue
        if type(weight) is not nn.Parameter or type(weight.data) is not Tensor or weight.element_size() < 2:
            _reject(
                f"the weight of {name} is a {type(weight.data).__name__} of {weight.dtype}, as quantised ones are"
            )
        if weight.device.type != "cpu":
            place = "not in memory (offloaded)" if weight.is_meta else f"on {weight.device}"
            _reject(f"weights are {place}")


def _layer(layer: Any, form: _Form, head_dim: int) -> StackLayer:
    attention, mlp = layer.self_attn, layer.mlp
    fused = hasattr(mlp, "gate_up_proj")
    return StackLayer(
        qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
        out=attention.o_proj,
        gate_up=(mlp.gate_up_proj,) if fused else (mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
        q_norm=_heads(attention, "q", head_dim),
        k_norm=_heads(attention, "k", head_dim),
        **{field: _scale(norm, form) for field, norm in _norms(form, layer).items()},
    )


def _norms(form: _Form, layer: nn.Module) -> dict[str, nn.Module]:
    return {field: layer.get_submodule(name) for field, name in form.norms.items()}


def _scale(norm: nn.Module, form: _Form) -> Tensor:
    """The numbers that an RMSNorm multiplies with, [dim]."""
    weight: Tensor = norm.weight.detach()  # type: ignore[operator]
    return weight.float() + form.norm_offset if form.norm_offset else weight


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _heads(attention: Any, part: str, head_dim: int) -> HeadScale | None:
    """The norm of queries or keys, with a row for each head."""
    norm = getattr(attention, f"{part}_norm", None)
    if norm is None:
        return None
    heads = getattr(attention, f"{part}_proj").out_features // head_dim
    weight, bias = norm.weight.detach(), getattr(norm, "bias", None)
    return weight.expand(heads, -1), None if bias is None else bias.detach().expand(heads, -1)


def _numbers(layer: Any, form: _Form) -> tuple[int, int, float, type, float]:
    """Channels of a head, hidden channels, scale of the scores, class of the gate, epsilon; nan where norms differ in that."""
    attention, mlp = layer.self_attn, layer.mlp
    gate = type(mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn)
    epsilons = {_eps(norm) for norm in _norms(form, layer).values()}
    eps = epsilons.pop() if len(epsilons) == 1 else nan
    return int(attention.head_dim), int(mlp.down_proj.in_features), float(attention.scaling), gate, eps


def _rotated(body: nn.Module) -> int:
    """How many channels of a head are rotated, the first ones."""
    rotary: Any = body.get_submodule("rotary_emb")
    if rotary.rope_type not in ROPES:
        _reject(f"rotary embeddings of type {rotary.rope_type!r} change with the length of a sequence")
    return 2 * int(rotary.inv_freq.numel())


def _order(head_dim: int, rotated: int, interleaved: bool) -> Tensor | None:
    """`Stack.qk_order`: the pairs of rotation half against half, the channels that are not rotated after them."""
    if rotated == head_dim and not interleaved:
        return None
    first, rest = torch.arange(rotated), torch.arange(rotated, head_dim).view(2, -1)
    pairs = first.view(-1, 2).T if interleaved else first.view(2, -1)
    return torch.cat((pairs, rest), 1).flatten()
