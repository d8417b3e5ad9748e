"""The decoder layers of a transformers model, run with a KV cache of ours.

The model computes everything but attention itself: its projections, norms and rotary embeddings, and whatever adapters or
quantised weights are in them. For a pass its config names an attention function of ours (`AttentionInterface` of
transformers), which hands queries, keys and values to the cache of that pass. So no weight is copied, and the model's own
attention, as it was chosen when it was loaded, is back after the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from lanternpp.nn.decoder import AttentionCache, Decoder, DecoderConfig, additive_mask
from lanternpp.types import Nodes

NAME = "lanternpp"  # of the attention function, in a model's config during a pass

_running: ContextVar[tuple[Nodes, AttentionCache]] = ContextVar("running_pass")


def _attention(
    layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """query [R, H, N, d], key and value [R, Hkv, N, d] of the nodes of the running pass -> [R, N, H, d]."""
    nodes, cache = _running.get()
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return cache.attend(int(layer.layer_idx), nodes, attention_mask, query, key, value), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _attention)


class TransformersDecoder(Decoder):
    """A decoder whose layers and final norm are those of a transformers model.

    body: the module that takes `inputs_embeds` and returns `last_hidden_state`. positions: from positions [R, N] to the
    model's `position_ids`, where these are not the same.
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

    def forward(self, x: Tensor, nodes: Nodes, cache: AttentionCache, taps: tuple[int, ...] = ()) -> Tensor:
        """x [R, N, D] at `nodes` -> features [R, N, D], with taps [R, N, (1 + taps) D]; their keys and values go to `cache`."""
        config: Any = self.body.config
        usual = config._attn_implementation
        running = _running.set((nodes, cache))
        config._attn_implementation = NAME
        try:
            found = self.body(
                inputs_embeds=x,
                attention_mask=additive_mask(nodes.mask, x.dtype),
                position_ids=self.positions(nodes.position),
                use_cache=False,
                output_hidden_states=bool(taps),
            )
        finally:
            config._attn_implementation = usual
            _running.reset(running)
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
