"""The decoder layers of a transformers model, run with a KV cache of ours.

The model computes everything but attention itself: its projections, norms and rotary embeddings, and whatever adapters or
quantised weights are in them. Its attention modules ask their config for an attention function (`AttentionInterface` of
transformers). Passes run on replicas of the model's body, layers and attention modules, which share all weights with it and
whose config names a function of ours; that hands queries, keys and values to the cache of the pass. So no weight is copied and
nothing of the model changes, and other threads may run the model meanwhile.

On request (`use_kernels`) the backend computes the passes, from a copy of the layers' weights in the order that it reads them in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from lanternpp.errors import InputError
from lanternpp.models.transformers.stack import rotary_table, stack_of
from lanternpp.nn.backend import backend
from lanternpp.nn.decoder import Decoder, DecoderConfig, Stack, line_table
from lanternpp.util.devices import free_memory
from lanternpp.util.registry import unknown

NAME = "lanternpp"  # of the attention function, in the config of the replicas
MOST = 1 << 15  # positions of the rotary table that drafters get
# bytes of a weight that is packed in this dtype, with the scales of int8
PACKED = {"bfloat16": 2.0, "int8": 1.01}
M = TypeVar("M", bound=nn.Module)


def _attention(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [R, H, N, d], key and value [R, Hkv, N, d] of the running pass -> [R, N, H, d]; the mask is the pass's own.

    InputError where attention is not plain: a window of the last tokens, capped scores, sinks.
    """
    decoder: TransformersDecoder = vars(layer)["decoder"]
    if sliding_window and sliding_window < decoder._prepared:
        raise InputError(
            f"its attention sees the last {sliding_window} tokens alone, and prompt and picture take {decoder._prepared}; "
            "use the model's own generate"
        )
    if softcap is not None or s_aux is not None:
        raise InputError(
            "its attention caps scores or has sinks, without which codes differ; use the model's own generate"
        )
    if scaling is not None and scaling != query.shape[-1] ** -0.5:
        query = query * (scaling * query.shape[-1] ** 0.5)
    decoder._attended += 1
    states = (x.transpose(1, 2) for x in (query, key, value))
    return decoder._attend(int(layer.layer_idx), *states), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _attention)


def replica(module: M) -> M:
    """A module of the same class, children, weights and hooks, whose own attributes can be set without changing `module`."""
    made = module.__new__(type(module))

    def own(value: Any) -> Any:
        if isinstance(value, MethodType) and value.__self__ is module:
            return MethodType(value.__func__, made)
        # as accelerate replaces `forward`
        if isinstance(value, partial) and value.args[:1] == (module,):
            return partial(value.func, made, *value.args[1:], **value.keywords)
        return value.copy() if isinstance(value, dict) else value

    # a list, as another thread may be setting attributes
    vars(made).update({name: own(value) for name, value in list(vars(module).items())})
    vars(made)["_compiled_call_impl"] = None  # of `module`, which `compile` has set
    return made


class TransformersDecoder(Decoder):
    """A decoder whose layers and final norm are those of a transformers model.

    body: the module that takes `inputs_embeds` and returns `last_hidden_state`. positions: from positions [R, N] to the
    model's `position_ids`. One thread at a time may use it.
    """

    # of the running pass, with the number of a layer
    _attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    packed_bytes = 0  # of the weights' copy

    def __init__(self, body: Any, qk_norm: bool, positions: Callable[[Tensor], Tensor]):
        nn.Module.__init__(self)
        self.body, self.positions = body, positions
        self.config, given = shape_of(body.config, qk_norm), body.config
        # of DTensors
        meshes = (
            getattr(weight, "device_mesh", None) for weight in body.get_submodule("layers").parameters()
        )
        self.ranks = next((mesh.size() for mesh in meshes if mesh), 1)
        if self.config.num_kv_heads % self.ranks:
            raise InputError(
                f"{self.config.num_kv_heads} heads of keys and values do not divide among {self.ranks} processes"
            )
        base = float((getattr(given, "rope_parameters", None) or {}).get("rope_theta", 10000.0))
        table = line_table(min(int(given.max_position_embeddings), MOST), self.config.head_dim, base)
        # for drafters
        self.register_buffer(
            "rotary_table", table.float().to(next(body.parameters()).device), persistent=False
        )
        attention_config: Any = copy.deepcopy(body.config)
        attention_config._attn_implementation = NAME
        self._attention_config = attention_config
        self.packed_dtype: str | None = None
        self._packed_weights: list[tuple[int, int, int]] = []
        self._prepared = 0  # positions
        self.replicate()

    def replicate(self) -> None:
        """Run passes from now on with the modules that the body has now."""
        body = replica(self.body)
        layers = replica(self.body.get_submodule("layers"))
        body._modules["layers"] = layers
        for name, original in layers.named_children():
            layer, attention = replica(original), replica(original.get_submodule("self_attn"))
            vars(attention).update(config=self._attention_config, decoder=self)
            layer._modules["self_attn"], layers._modules[name] = attention, layer
        # in a tuple: not a module of this one
        self._replicas = (body,)
        if self.packed_dtype is not None:
            self._pack(self.packed_dtype)

    def shared(self, positions: Callable[[Tensor], Tensor]) -> TransformersDecoder:
        """The same layers with other positions, for `prepare` to compute the rotations of. No weight is copied."""
        made = replica(self)
        made.positions, made.native, made.packed_dtype = positions, copy.copy(self.native), None
        if made.native is not None:
            made.native.rotary_table = made.native.rotary_table[:0]
        made.replicate()
        return made

    def stack(self) -> Stack:
        """As `stack_of`."""
        return stack_of(self.body)

    def use_kernels(self, dtype: str, release: bool = False) -> None:
        """Have the backend compute passes from now on, from a copy of the weights in `dtype`, a name of `PACKED`.

        release: free the weights of every layer as soon as they are copied, for a model that nobody else has. Raises InputError with
        the reason where the backend cannot compute these layers, or where there is no memory for the copy.
        """
        if dtype not in PACKED:
            raise InputError(unknown("kernels", dtype, PACKED))
        self._pack(dtype, release)
        self.packed_dtype = dtype

    def _pack(self, dtype: str, release: bool = False) -> None:
        """Copy the weights, unless the copy is of the same ones."""
        stack = self.stack()
        parts = (self.body.get_submodule(name) for name in ("layers", "norm"))
        parameters = [x for part in parts for x in part.parameters()]
        weights = [(id(x), x.data_ptr(), 0 if x.is_inference() else x._version) for x in parameters]
        if weights == self._packed_weights:
            return
        # the old copy is freed first
        self.native, self._packed_weights = None, []
        size = int(sum(x.numel() for x in parameters) * PACKED[dtype])
        free = None if release else free_memory(torch.device("cpu"))
        if free is not None and size > free:
            raise InputError(
                f"the copy of the weights that kernels={dtype!r} makes takes {size / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are "
                "free; leave out kernels"
            )
        # nothing but the model holds the weights that are released
        del parameters
        # rotations are those of a call's positions, by `prepare`
        table = torch.zeros(1, 2, stack.head_dim)
        own = stack.layers[0].out.weight.dtype
        self.native, self.packed_bytes = backend().decoder(stack, table, dtype, release), size
        if self.native is None:
            reason = f"this model is in {own}; load it with dtype=torch.bfloat16"
            if own == torch.bfloat16:
                reason = "there are none for this machine, or LANTERNPP_KERNELS=0 turns them off; leave out kernels"
            raise InputError(f"the kernels do not compute this model: {reason}")
        self._packed_weights = weights
        if self._prepared:
            self.prepare(self._prepared)

    def prepare(self, count: int) -> None:
        """Compute the rotations of positions 0 to `count` - 1, as `positions` has them now."""
        self._prepared = count
        if self.native is None:
            return
        table = rotary_table(self.body, self.config.head_dim, self.positions(torch.arange(count)[None]))
        if table.shape == self.native.rotary_table.shape:
            self.native.rotary_table.copy_(table)
        else:
            self.native.rotary_table = table

    def _layers(
        self,
        x: Tensor,
        positions: Tensor | None,
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        aux_layers: tuple[int, ...],
    ) -> Tensor:
        """A pass through the replicas, whose attention modules call `attend`."""
        line = torch.arange(x.shape[1], device=x.device)[None] if positions is None else positions
        self._attend, self._attended = attend, 0
        try:
            found = self._replicas[0](
                inputs_embeds=x,
                # of four dimensions, so that transformers makes none
                attention_mask=x.new_zeros(1, 1, 1, 1),
                position_ids=self.positions(line.expand(len(x), -1)),
                use_cache=False,
                output_hidden_states=bool(aux_layers),
            )
        finally:
            del self._attend
        if self._attended != self.config.layers:
            raise InputError(
                f"{self.config.layers - self._attended} of {self.config.layers} layers do not use the attention functions of transformers; "
                "undo what replaced their attention, or use lanternpp.restore(model)"
            )
        aux = [found.hidden_states[1 + layer] for layer in aux_layers]
        return torch.cat((found.last_hidden_state, *aux), -1) if aux else found.last_hidden_state


def shape_of(config: Any, qk_norm: bool) -> DecoderConfig:
    """The shape of a body by its config."""
    heads = int(config.num_attention_heads)
    return DecoderConfig(
        dim=int(config.hidden_size),
        layers=int(config.num_hidden_layers),
        heads=heads,
        hidden=int(config.intermediate_size),
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        # of a drafter's own norms; the body has its own modules
        norm_eps=float(
            getattr(config, "rms_norm_eps", None) or getattr(config, "layer_norm_eps", None) or 1e-5
        ),
        qk_norm=qk_norm,
        head_dim=int(getattr(config, "head_dim", None) or 0),
    )
