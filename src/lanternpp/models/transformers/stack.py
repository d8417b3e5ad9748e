"""The decoder layers of a transformers model as a `Stack`, and its rotary embeddings as a table.

The class of a layer says where its norms are and which channels rotation pairs. Everything else is read off its modules, which must
be those that the class makes of the config: a change of what they compute (an adapter, a hook, a quantised weight) is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from lanternpp.errors import InputError
from lanternpp.nn.decoder import DecoderConfig, Stack, StackLayer, is_hooked
from lanternpp.nn.sources import blank

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


def stack_of(body: nn.Module) -> Stack:
    """Describe the layers and the final norm of a transformers model, without a copy of its weights.

    body: the module that has `layers`, `norm`, `rotary_emb` and a config. Raises InputError with the reason where a `Stack`
    cannot describe these, or weights are not plain tensors in the memory of the CPU.
    """
    config: Any = body.config
    layers: list[Any] = list(body.get_submodule("layers").children())
    kind = type(layers[0])
    form = FORMS.get(kind.__name__.removesuffix("DecoderLayer"))
    if form is None or not kind.__module__.startswith("transformers.models."):
        _reject(f"{kind.__name__} is not known; known are those of {', '.join(FORMS)}")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "sliding_window", None) or layer_types - {"full_attention"}:
        _reject("its attention sees a window of the last tokens alone")
    if getattr(config, "use_bidirectional_attention", None):
        _reject("its attention is not causal")
    _check_modules(body, kind)
    mlp, shape = layers[0].mlp, shape_of(body)
    gate = type(mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn)
    if gate not in GATES:
        _reject(f"their gate is {gate.__name__}")
    qk_norm = getattr(layers[0].self_attn, "q_norm", None)
    return Stack(
        shape,
        layers=[_layer(layer, form, shape) for layer in layers],
        norm=_scale(body.get_submodule("norm"), form),
        qk_norm="none" if qk_norm is None else "layer" if shape.qk_norm else "rms",
        gate=GATES[gate],
        qk_order=_qk_order(shape.head_dim, _num_rotated(body), form.interleaved),
    )


def shape_of(body: Any) -> DecoderConfig:
    """Return the shape of a body by its config; drafters norm as it does, with the same epsilon."""
    config, heads = body.config, int(body.config.num_attention_heads)
    return DecoderConfig(
        dim=int(config.hidden_size),
        layers=int(config.num_hidden_layers),
        heads=heads,
        hidden=int(config.intermediate_size),
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        norm_eps=float(getattr(config, "rms_norm_eps", 1e-5)),
        qk_norm=isinstance(getattr(body.layers[0].self_attn, "q_norm", None), nn.LayerNorm),
        head_dim=int(getattr(config, "head_dim", None) or 0),
    )


def rotary_table(body: nn.Module, head_dim: int, positions: Tensor) -> Tensor:
    """Return the rotations of a model's `rotary_emb`, for `rotate`, [P, 2, head_dim] in float32.

    positions: `position_ids` of one row, [1, P], or [3, 1, P] where a token has three positions. Channels are in the
    order of the stack's `qk_order`; channels that the model does not rotate have cosine 1 and sine 0.
    """
    cos, sin = body.get_submodule("rotary_emb")(torch.zeros(1, device=positions.device), positions)
    half = cos.shape[-1] // 2  # the second half of the channels repeats the first
    unrotated = (0, head_dim // 2 - half)
    cos = nn.functional.pad(cos[0, :, :half].float(), unrotated, value=1.0)  # [P, head_dim / 2]
    sin = nn.functional.pad(sin[0, :, :half].float(), unrotated)
    return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1)


def _reject(reason: str) -> NoReturn:
    raise InputError(f"the layers of this model stay with PyTorch: {reason}")


def _check_modules(body: nn.Module, kind: Any) -> None:
    """Reject layers and a final norm other than those that `kind`, the class of the layers, makes of the config."""
    config: Any = body.config
    with blank():
        usual_layer: nn.Module = kind(config, 0)
    parts = [
        (f"layers.{i}", layer, usual_layer) for i, layer in body.get_submodule("layers").named_children()
    ]
    if len(parts) != config.num_hidden_layers:
        _reject(f"there are {len(parts)} and its config says {config.num_hidden_layers}")
    parts.append(("norm", body.get_submodule("norm"), usual_layer.get_submodule("input_layernorm")))
    _check_module("the model", body)
    for path, part, usual_part in parts:
        usual_modules = dict(usual_part.named_modules())
        for inner, module in part.named_modules():
            name, usual = f"{path}.{inner}".rstrip("."), usual_modules.get(inner)
            if usual is None:
                _reject(f"they have further modules: {name}")
            if type(module) is not type(usual):
                _reject(f"{name} is a {type(module).__name__}, as with adapters or quantised weights")
            numbers = {field: x for field, x in vars(usual).items() if isinstance(x, int | float)}
            for field in numbers.keys() - {"training", "layer_idx"}:
                if getattr(module, field) != numbers[field]:
                    _reject(f"the {field} of {name} is another than that of its config")
            _check_module(name, module)


def _check_module(name: str, module: nn.Module) -> None:
    """Reject a module whose computation differs from its class's, or whose weights are no plain tensors on the CPU."""
    if module.training:
        _reject("it is in training mode; call model.eval()")
    if is_hooked(module):
        _reject(f"{name} has hooks or another forward, as of offloaded or distributed weights")
    for weight in module.parameters(recurse=False):
        if type(weight) is not nn.Parameter or type(weight.data) is not Tensor or weight.element_size() < 2:
            _reject(
                f"the weight of {name} is a {type(weight.data).__name__} of {weight.dtype}, as quantised ones are"
            )
        if weight.device.type != "cpu":
            location = "not in memory (offloaded)" if weight.is_meta else f"on {weight.device}"
            _reject(f"weights are {location}")


def _layer(layer: Any, form: _Form, config: DecoderConfig) -> StackLayer:
    attention, mlp = layer.self_attn, layer.mlp
    fused = hasattr(mlp, "gate_up_proj")
    return StackLayer(
        qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
        out=attention.o_proj,
        gate_up=(mlp.gate_up_proj,) if fused else (mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
        qk_norm=_head_norm(attention, config),
        **{field: _scale(layer.get_submodule(name), form) for field, name in form.norms.items()},
    )


def _scale(norm: nn.Module, form: _Form) -> Tensor:
    """Return the factors of an RMSNorm, [dim]."""
    weight: Tensor = norm.weight.detach()  # type: ignore[operator]
    return weight.float() + form.norm_offset if form.norm_offset else weight


def _head_norm(attention: Any, config: DecoderConfig) -> tuple[Tensor, Tensor | None] | None:
    """Return `StackLayer.qk_norm`, with a row for every head."""
    if getattr(attention, "q_norm", None) is None:
        return None
    norms = (attention.q_norm, config.heads), (attention.k_norm, config.num_kv_heads)

    def rows(name: str) -> Tensor:
        return torch.cat([getattr(norm, name).detach().expand(heads, -1) for norm, heads in norms])

    return rows("weight"), rows("bias") if config.qk_norm else None


def _num_rotated(body: nn.Module) -> int:
    """Return the number of rotated channels of a head, which are its first ones."""
    rotary: Any = body.get_submodule("rotary_emb")
    if rotary.rope_type not in ROPES:
        _reject(f"rotary embeddings of type {rotary.rope_type!r} change with the length of a sequence")
    return 2 * int(rotary.inv_freq.numel())


def _qk_order(head_dim: int, num_rotated: int, interleaved: bool) -> Tensor:
    """Return `Stack.qk_order`, which pairs channels half against half: rotated channels first, then the others."""
    rotated, unrotated = torch.arange(head_dim).tensor_split([num_rotated])
    pairs = rotated.view(-1, 2).T if interleaved else rotated.view(2, -1)  # [2, pairs]
    return torch.cat((pairs, unrotated.view(2, len(unrotated) // 2)), 1).flatten()
