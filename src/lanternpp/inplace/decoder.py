"""The decoder layers of a transformers model, run with a KV cache of ours.

The model computes everything but attention itself: its projections, norms and rotary embeddings, and whatever adapters or
quantised weights are in them. Its attention modules ask their config for an attention function (`AttentionInterface` of
transformers). Passes run on replicas of the model's body, layers and attention modules, which share all weights with it and
whose config names a function of ours; that hands queries, keys and values to the cache of the pass. So no weight is copied and
nothing of the model changes, and other threads may run the model meanwhile.
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
from lanternpp.nn.decoder import AttentionCache, Decoder, DecoderConfig, additive_mask
from lanternpp.types import Nodes

NAME = "lanternpp"  # of the attention function, in the config of the replicas
M = TypeVar("M", bound=nn.Module)


def _attention(
    layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """query [R, H, N, d], key and value [R, Hkv, N, d] of the nodes of the running pass -> [R, N, H, d]."""
    decoder: TransformersDecoder = vars(layer)["decoder"]
    return decoder.attend(int(layer.layer_idx), attention_mask, query, key, value), None  # type: ignore[arg-type]


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

    vars(made).update({name: own(value) for name, value in vars(module).items()})
    return made


class TransformersDecoder(Decoder):
    """A decoder whose layers and final norm are those of a transformers model.

    body: the module that takes `inputs_embeds` and returns `last_hidden_state`. positions: from positions [R, N] to the
    model's `position_ids`, where these are not the same. One thread at a time may use it.
    """

    def __init__(
        self,
        body: nn.Module,
        config: DecoderConfig,
        rotary_table: Tensor,
        positions: Callable[[Tensor], Tensor] = lambda position: position,
    ):
        nn.Module.__init__(self)
        self.body, self.config, self.positions = body, config, positions
        self.register_buffer("rotary_table", rotary_table, persistent=False)  # for drafters
        attention_config: Any = copy.deepcopy(body.config)
        attention_config._attn_implementation = NAME
        self._attention_config = attention_config
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

    def attend(self, layer: int, mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [R, H, N, d], key and value [R, Hkv, N, d] of the running pass -> [R, N, H, d]."""
        nodes, cache = self._running
        self._attended += 1
        return cache.attend(layer, nodes, mask, *(x.transpose(1, 2) for x in (query, key, value)))

    def forward(self, x: Tensor, nodes: Nodes, cache: AttentionCache, taps: tuple[int, ...] = ()) -> Tensor:
        """x [R, N, D] at `nodes` -> features [R, N, D], with taps [R, N, (1 + taps) D]; their keys and values go to `cache`."""
        self._running, self._attended = (nodes, cache), 0
        try:
            found = self._replicas[0](
                inputs_embeds=x,
                attention_mask=additive_mask(nodes.mask, x.dtype),
                position_ids=self.positions(nodes.position),
                use_cache=False,
                output_hidden_states=bool(taps),
            )
        finally:
            del self._running
        if self._attended != self.config.layers:
            raise InputError(
                f"{self.config.layers - self._attended} of {self.config.layers} layers do not use the attention functions of transformers; "
                "undo what replaced their attention, or use lanternpp.restore(model)"
            )
        features: Tensor = found.last_hidden_state
        return (
            torch.cat((features, *(found.hidden_states[1 + tap] for tap in taps)), -1) if taps else features
        )

    def forward_sequence(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        seen: Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> Tensor:
        """Not there: drafters are trained on a model that this package read itself."""
        raise NotImplementedError("train drafters with `lanternpp train drafter --model ID --self`")
