"""The decoder layers of a transformers model, run with a KV cache of ours.

The model computes everything except attention: its projections, norms and rotary embeddings, and the adapters or quantised
weights in them. Its attention modules ask their config for an attention function (`AttentionInterface` of transformers). Passes
run on replicas of the model's body, layers and attention modules, which share all weights with it and whose config names a
function of ours; the function hands queries, keys and values to the cache of the pass. So no weight is copied, nothing of the
model changes, and other threads may run the model meanwhile.

On request (`use_kernels`) the backend computes the passes, from a copy of the layers' weights in the order of its reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from lanternpp.errors import InputError
from lanternpp.models.transformers.stack import rotary_table, shape_of, stack_of
from lanternpp.nn.backend import BYTES_PER_WEIGHT, backend
from lanternpp.nn.decoder import Decoder, line_table
from lanternpp.util.devices import free_memory
from lanternpp.util.registry import unknown

ATTENTION = "lanternpp"  # the attention function's name, in the config of the replicas
MAX_POSITIONS = 1 << 15  # of the rotary table that drafters get
M = TypeVar("M", bound=nn.Module)


def _attention(
    layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend with query [R, H, N, d], key and value [R, Hkv, N, d] of the running pass, by its own mask; return [R, N, H, d].

    options: of an attention function of transformers. Raises InputError where attention has a window of the last tokens, caps
    scores or has sinks.
    """
    decoder: TransformersDecoder = vars(layer)["decoder"]()
    window, scaling = options.get("sliding_window"), options.get("scaling")
    if window and window < decoder._num_prepared:
        raise InputError(
            f"its attention sees the last {window} tokens alone, and prompt and picture take {decoder._num_prepared}; "
            "use the model's own generate"
        )
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise InputError(
            "its attention caps scores or has sinks, without which codes differ; use the model's own generate"
        )
    if scaling is not None and scaling != query.shape[-1] ** -0.5:
        query = query * (scaling * query.shape[-1] ** 0.5)
    decoder._num_attended += 1
    states = (x.transpose(1, 2) for x in (query, key, value))
    return decoder._attend(int(layer.layer_idx), *states), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, _attention)


def replica(module: M) -> M:
    """Return a module with the class, children, weights and hooks of `module`; setting its attributes leaves `module` as it is."""
    copied = module.__new__(type(module))

    def rebound(value: Any) -> Any:
        if isinstance(value, MethodType) and value.__self__ is module:
            return MethodType(value.__func__, copied)
        # accelerate replaces `forward` by a partial function of the module.
        if isinstance(value, partial) and value.args[:1] == (module,):
            return partial(value.func, copied, *value.args[1:], **value.keywords)
        return value.copy() if isinstance(value, dict) else value

    # Another thread may be setting attributes, so the loop is over a list.
    vars(copied).update({name: rebound(value) for name, value in list(vars(module).items())})
    vars(copied)["_compiled_call_impl"] = None  # `compile` makes one that calls `module`
    return copied


class TransformersDecoder(Decoder):
    """A decoder whose layers and final norm are those of a transformers model.

    body: the module that takes `inputs_embeds` and returns `last_hidden_state`. One thread at a time may use the decoder.
    """

    # Attention of the running pass: the number of a layer, queries, keys and values.
    _attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    packed_bytes = 0  # of the copy of the weights
    position_table: Tensor | None = None  # [slots, 3] position ids; None: the id of a slot is its number

    def __init__(self, body: Any):
        nn.Module.__init__(self)
        self.body, self.config = body, shape_of(body)
        # Weights that several processes share are DTensors.
        meshes = (getattr(x, "device_mesh", None) for x in body.get_submodule("layers").parameters())
        self.ranks = next((mesh.size() for mesh in meshes if mesh), 1)
        if self.config.num_kv_heads % self.ranks:
            raise InputError(
                f"{self.config.num_kv_heads} heads of keys and values do not divide among {self.ranks} processes"
            )
        # Drafters rotate by a table of their target's base.
        base = float((getattr(body.config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))
        num_positions = min(int(body.config.max_position_embeddings), MAX_POSITIONS)
        table = line_table(num_positions, self.config.head_dim, base).float()
        self.register_buffer("rotary_table", table.to(next(body.parameters()).device), persistent=False)
        self._attention_config: Any = copy.deepcopy(body.config)
        self._attention_config._attn_implementation = ATTENTION
        self.packed_dtype: str | None = None
        self._packed_weights: list[tuple[int, int, int]] = []  # that `native` has a copy of
        self._num_prepared = 0  # positions
        self.replicate()

    def replicate(self) -> None:
        """Run passes from now on with the modules that the body has now."""
        body = replica(self.body)
        layers = replica(self.body.get_submodule("layers"))
        body._modules["layers"] = layers
        for name, original in layers.named_children():
            layer, attention = replica(original), replica(original.get_submodule("self_attn"))
            # Within a cycle of references the weights would stay in memory until garbage is collected.
            vars(attention).update(config=self._attention_config, decoder=ref(self))
            layer._modules["self_attn"], layers._modules[name] = attention, layer
        self._replicas = (body,)  # a tuple, so that the replica is no child of this module
        if self.packed_dtype is not None:
            self.use_kernels(self.packed_dtype)

    def shared(self) -> TransformersDecoder:
        """Return a decoder of the same layers and weights, whose positions can differ; `prepare` computes their rotations."""
        decoder = replica(self)
        decoder.native, decoder.packed_dtype = copy.copy(self.native), None
        if decoder.native is not None:
            decoder.native.rotary_table = decoder.native.rotary_table[:0]
        decoder.replicate()
        return decoder

    def use_kernels(self, dtype: str, release: bool = False) -> None:
        """Have the backend compute passes from now on, from a copy of the weights in `dtype`, a name of `BYTES_PER_WEIGHT`.

        A copy of the same weights is kept. release: free the weights of every layer as soon as they are copied, for a model
        that nobody else uses. Raises InputError with the reason where the backend cannot compute these layers, or where there is
        no memory for the copy.
        """
        if dtype not in BYTES_PER_WEIGHT:
            raise InputError(unknown("kernels", dtype, BYTES_PER_WEIGHT))
        stack = stack_of(self.body)
        parameters = [x for name in ("layers", "norm") for x in self.body.get_submodule(name).parameters()]
        weights = [(id(x), x.data_ptr(), 0 if x.is_inference() else x._version) for x in parameters]
        if weights == self._packed_weights:
            return
        self.native, self._packed_weights = None, []  # frees the old copy
        size = int(sum(x.numel() for x in parameters) * BYTES_PER_WEIGHT[dtype])
        free = None if release else free_memory(torch.device("cpu"))
        if free is not None and size > free:
            raise InputError(
                f"the copy of the weights that kernels={dtype!r} makes takes {size / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are "
                "free; leave out kernels"
            )
        # Weights can be released only while nothing except the model refers to them.
        del parameters
        own_dtype = stack.layers[0].out.weight.dtype
        # `prepare` replaces the rotations, which depend on a call's positions.
        self.native = backend().decoder(stack, torch.zeros(1, 2, self.config.head_dim), dtype, release)
        self.packed_bytes = size
        if self.native is None:
            reason = f"this model is in {own_dtype}; load it with dtype=torch.bfloat16"
            if own_dtype == torch.bfloat16:
                reason = "there are none for this machine, or LANTERNPP_KERNELS=0 turns them off; leave out kernels"
            raise InputError(f"the kernels do not compute this model: {reason}")
        self._packed_weights, self.packed_dtype = weights, dtype
        if self._num_prepared:
            self.prepare(self._num_prepared)

    def position_ids(self, slot: Tensor) -> Tensor:
        """Return the model's `position_ids` of slots [R, N]: of the same shape, or [3, R, N] by `position_table`."""
        if self.position_table is None:
            return slot
        table = self.position_table.to(slot.device)
        return table[slot.clamp(max=len(table) - 1)].permute(2, 0, 1)

    def rotations(self, slot: Tensor) -> Tensor:
        """Return the rotations of slots [1, N], by `rotary_table`."""
        return rotary_table(self.body, self.config.head_dim, self.position_ids(slot))

    def prepare(self, num_positions: int) -> None:
        """Compute the rotations of slots 0 to `num_positions` - 1."""
        self._num_prepared = num_positions
        if self.native is None:
            return
        table = self.rotations(torch.arange(num_positions)[None])
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
        """Run a pass through the replicas, whose attention modules call `attend`."""
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
        self._attend, self._num_attended = attend, 0
        try:
            outputs = self._replicas[0](
                inputs_embeds=x,
                # transformers makes no mask of its own where this one has four dimensions.
                attention_mask=x.new_zeros(1, 1, 1, 1),
                position_ids=self.position_ids(positions.expand(len(x), -1)),
                use_cache=False,
                output_hidden_states=bool(aux_layers),
            )
        finally:
            del self._attend
        if self._num_attended != self.config.layers:
            raise InputError(
                f"{self.config.layers - self._num_attended} of {self.config.layers} layers do not use the attention functions of transformers; "
                "undo what replaced their attention, or use lanternpp.restore(model)"
            )
        aux = [outputs.hidden_states[1 + layer] for layer in aux_layers]
        return torch.cat((outputs.last_hidden_state, *aux), -1) if aux else outputs.last_hidden_state
