"""A drafter that predicts all levels of a draft in one pass, with learned queries where no code is known yet.

The drafter works on guided features: a linear head of guided features returns guided logits, so one row is enough for both branches
of classifier-free guidance. A query attends to all decided codes and to the queries before it (the mask tokens of PaSS, arXiv
2311.13581). The feature of a level is then conditioned on the previous draft code, through two small layers (the sequential heads of
Hydra, arXiv 2402.05109), and one more layer predicts from it the probability that the code is kept. Of decided codes the drafter may
also read the outputs of layers below the target's last (EAGLE-3, arXiv 2503.01840), guided as features are. The target's features at
the rejected end of the last draft predict those of the next pass, as in Jacobi decoding (arXiv 2410.01699), and are added to the
queries as hints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

import torch
import torch.nn.functional as F
from annotated_types import Len
from torch import Tensor, nn

from lanternpp.drafters.base import Drafter, DrafterConfig
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn.backend import backend
from lanternpp.nn.checkpoints import Slots, Width
from lanternpp.nn.decoder import AttentionCache, Decoder
from lanternpp.nn.sources import Source
from lanternpp.types import Nodes
from lanternpp.util.jsonfile import Between

AuxLayers = Annotated[tuple[Annotated[int, Between(0, 511)], ...], Len(0, 16)]


@dataclass(frozen=True)
class ParallelConfig(DrafterConfig):
    """The shape of a parallel drafter."""

    queries: Slots = 7  # levels beyond the first; deeper ones repeat the last query
    turn: Width = 256  # H: width of the layers that condition on the previous code
    aux_layers: AuxLayers = ()  # layers of the target below its last, counted from 0, whose output is read too
    # Whether the probability that a code is kept is predicted; older drafters lack it.
    confidence: bool = False

    def __post_init__(self) -> None:
        if list(self.aux_layers) != sorted(set(self.aux_layers)):
            raise ValueError(
                f"aux_layers {list(self.aux_layers)} must be different layers in ascending order"
            )


class ParallelDrafter(Drafter):
    """fc((2 + aux) D -> D), a decoder, and a query for every level beyond the first, with one row per sample.

    confidence: D -> 1, from the conditioned features of a level: the logit of the probability that block verification keeps its
    code, given that all codes before it are kept; None: no such layer.
    """

    kind = "parallel"
    config_class = ParallelConfig
    about = "folders written by lanternpp train"
    proposer = "lanternpp.proposers.parallel:Parallel"

    def __init__(self, config: ParallelConfig, rotary_table: Tensor):
        super().__init__()
        self.config = config
        dim = config.decoder.dim
        self.aux_layers = config.aux_layers
        self.fc = nn.Linear((2 + len(config.aux_layers)) * dim, dim)
        self.queries = nn.Parameter(torch.empty(config.queries, dim))
        nn.init.normal_(self.queries, std=0.02)
        self.decoder = Decoder(config.decoder, rotary_table)
        self.hint = nn.Linear(dim, dim, bias=False)
        # The layers of `condition_on`: for a level's features, for the embedding of the previous code, and back to features.
        self.down = nn.Linear(dim, config.turn)
        self.before = nn.Linear(dim, config.turn, bias=False)
        self.up = nn.Linear(config.turn, dim)
        self.confidence = nn.Linear(dim, 1) if config.confidence else None

    @classmethod
    def read(cls, source: Source, target: Target, dtype: torch.dtype) -> Self:
        """Read the drafter; InputError where it reads layers that the target does not have below its last."""
        drafter, layers = super().read(source, target, dtype), target.decoder.config.layers
        if drafter.aux_layers and drafter.aux_layers[-1] >= layers - 1:
            raise InputError(
                f"drafter {source.path} reads layer {drafter.aux_layers[-1]} of its target, counted from 0, and this one has "
                f"{layers}; use a drafter trained for this target"
            )
        return drafter

    def pack(self, target: Target) -> None:
        """Prepare for passes over few rows; C then draws the codes of a chain, where the target's head is linear."""
        if all(getattr(type(self), name) is getattr(ParallelDrafter, name) for name in ("inputs", "combine")):
            self.native = backend(next(self.parameters()).device).drafter(self, target)
        super().pack(target)

    def forward(
        self,
        next_embeds: Tensor,
        features: Tensor,
        nodes: Nodes,
        cache: AttentionCache,
        hints: Tensor | None = None,
    ) -> Tensor:
        """next_embeds [B, N, D], guided features [B, N, (1 + aux) D] -> features at the positions after all `nodes`, [B, N + Q, D].

        The last Q nodes are queries: positions without a decided code. hints [B, N + Q, D]: the target's features at these
        positions on the rejected end of the last draft; 0 where there are none.
        """
        num_queries = nodes.position.shape[1] - next_embeds.shape[1]
        return self.decoder(self.inputs(next_embeds, features, num_queries, 1, hints), nodes, cache)

    def inputs(
        self, next_embeds: Tensor, features: Tensor, levels: int, times: int, hints: Tensor | None
    ) -> Tensor:
        """next_embeds [B, N, D], features [B, N, (1 + aux) D] and hints -> the decoder's input, [B, N + times * levels, D].

        The outputs of layers are divided by their root mean square, as they may be large and have passed no norm.
        """
        if self.native is not None and times == 1:
            native_inputs = self.native.inputs(next_embeds, features, levels, hints)
            if native_inputs is not None:
                return native_inputs
        if self.aux_layers:
            dim = self.config.decoder.dim
            aux = features[..., dim:].unflatten(-1, (-1, dim))
            aux = F.rms_norm(aux, (dim,), eps=self.config.decoder.norm_eps)
            features = torch.cat((features[..., :dim], aux.flatten(-2)), -1)
        x = self.fc(torch.cat((next_embeds, features), -1))
        if levels:
            level = torch.arange(times * levels, device=x.device).remainder_(levels)
            queries = self.queries[level.clamp_(max=self.config.queries - 1)].expand(len(x), -1, -1)
            x = torch.cat((x, queries.to(x.dtype)), 1)
        return x if hints is None else x + self.hint(hints)

    def combine(self, features: Tensor, level_query: Tensor, prev_code: Tensor) -> Tensor:
        """Return the features of a level [..., D] plus a correction for the previous draft code.

        level_query [..., H]: `down` of the features; prev_code [..., H]: `before` of the code's embedding; H = config.turn.
        """
        return features + self.up(F.silu(level_query + prev_code))

    def condition_on(self, features: Tensor, prev_embeds: Tensor) -> Tensor:
        """Return the features [..., D] of a level, conditioned on the embeddings [..., D] of the previous draft codes."""
        return self.combine(features, self.down(features), self.before(prev_embeds))

    def forward_sequence(
        self,
        next_embeds: Tensor,
        features: Tensor,
        anchors: Tensor,
        levels: int,
        start: Tensor | None = None,
        hints: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """next_embeds [B, S, D], features [B, S, (1 + aux) D], anchors [B, A] slots to draft from -> features after them.

        Return [B, S, D] of the first level, and [B, A, levels, D] of further levels: each query attends to the slots up to its
        anchor and to the queries between. Rows begin at start [B]; None: at slot 0. hints [B, S + A * levels, D].
        """
        slots, times = next_embeds.shape[1], anchors.shape[1]
        x = self.inputs(next_embeds, features, levels, times, hints)
        out = self.decoder.forward_sequence(x, *branches(slots, anchors, levels, start))
        return out[:, :slots], out[:, slots:].unflatten(1, (times, levels))


def branches(slots: int, anchors: Tensor, levels: int, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return positions [B, N] and mask [B, 1, N, N] of `slots` slots and of a chain of `levels` nodes after every anchor.

    N = slots + A * levels. The chain after an anchor, of anchors [B, A], attends to the slots up to the anchor, and to
    no other chain. Rows begin at start [B]; None: at slot 0.
    """
    slot = torch.arange(slots, device=anchors.device).expand(len(anchors), -1)
    level = torch.arange(levels, device=anchors.device).repeat(anchors.shape[1])
    chain_anchor = anchors.repeat_interleave(levels, 1)
    position, anchor = torch.cat((slot, chain_anchor + 1 + level), 1), torch.cat((slot, chain_anchor), 1)
    return position, branch_mask(position, anchor, start)


def branch_mask(position: Tensor, anchor: Tensor, start: Tensor | None) -> Tensor:
    """Return the mask [B, 1, N, N] of nodes at positions [B, N]; start as for `branches`.

    A node attends to the slots up to its anchor [B, N], and to itself and the earlier nodes of the same anchor. A slot is its own
    anchor; a padding slot attends to itself alone, since a softmax over no slot would be NaN.
    """
    to_slots = (position == anchor)[:, None] & (position[:, None] <= anchor[..., None])
    if start is not None:
        to_slots = to_slots & (position[:, None] >= start[:, None, None])
    same_anchor = anchor[:, None] == anchor[..., None]
    return (to_slots | (same_anchor & (position[:, None] <= position[..., None])))[:, None]
