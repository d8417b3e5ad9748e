"""A drafter that predicts all levels of a draft in one pass, with learned queries where no code is known yet.

It works on guided features: where the head is linear, the head of merged features is the merged logits, so
one row does for both branches of classifier-free guidance. A query sees everything decided and the queries
before it (the mask tokens of PaSS, arXiv 2311.13581); its feature of a level is then conditioned on the
code drafted just before, through two small layers (the sequential heads of Hydra, arXiv 2402.05109), and one more layer reads
from it how likely the code will be kept. Of decided codes it
may also read what layers below the target's last return (EAGLE-3, arXiv 2503.01840), guided as features are. The target's
features at the rejected end of the last draft predict those of the next pass there, as in Jacobi decoding (arXiv
2410.01699); they are added to the queries as hints.
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
from lanternpp.nn.backend import DrafterKernels, backend
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
    confidence: bool = False  # whether it predicts how likely codes are kept; older ones do not

    def __post_init__(self) -> None:
        if list(self.aux_layers) != sorted(set(self.aux_layers)):
            raise ValueError(
                f"aux_layers {list(self.aux_layers)} must be different layers in ascending order"
            )


class ParallelDrafter(Drafter):
    """fc((2 + aux) D -> D), a decoder, and a query for every level beyond the first, with one row per sample.

    confidence: D -> 1, of conditioned features of a level: the logit of how probable it is that block verification keeps its
    code, given that those before are kept; None: it predicts none.
    """

    config_class = ParallelConfig
    about = "folders written by lanternpp train"
    proposer = "lanternpp.proposers.parallel:Parallel"
    native: DrafterKernels | None = None  # set by `pack`

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
        # What `combine` reads of a level's features, and of the embedding of the code before it.
        self.down = nn.Linear(dim, config.turn)
        self.before = nn.Linear(dim, config.turn, bias=False)
        self.up = nn.Linear(config.turn, dim)
        self.confidence = nn.Linear(dim, 1) if config.confidence else None

    @classmethod
    def read(cls, source: Source, target: Target, dtype: torch.dtype) -> Self:
        """As `Drafter.read`; also an InputError where it reads layers that the target does not have below its last."""
        drafter, layers = super().read(source, target, dtype), target.decoder.config.layers
        if drafter.aux_layers and drafter.aux_layers[-1] >= layers - 1:
            raise InputError(
                f"drafter {source.path} reads layer {drafter.aux_layers[-1]} of its target, counted from 0, and this one has "
                f"{layers}; use a drafter trained for this target"
            )
        return drafter

    def pack(self, target: Target) -> None:
        """Prepare for passes over few rows; the codes of a chain are then drawn in C, where the target's head is linear."""
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
        """next_embeds [B, N, D], guided features [B, N, (1 + aux) D] -> those at the positions after all `nodes`, [B, N + Q, D].

        The last Q nodes are queries: places where no code is known yet. hints [B, N + Q, D]: the
        target's features at these positions on the rejected end of the last draft; 0 where there are none.
        """
        queries = nodes.position.shape[1] - next_embeds.shape[1]
        return self.decoder(self.inputs(next_embeds, features, queries, 1, hints), nodes, cache)

    def inputs(
        self, next_embeds: Tensor, features: Tensor, levels: int, times: int, hints: Tensor | None
    ) -> Tensor:
        """The decoder's input: next_embeds [B, N, D], features [B, N, (1 + aux) D] and hints -> [B, N + times * levels, D].

        What layers return is divided by its root mean square, as it may be large and has passed no norm.
        """
        found = None
        if self.native is not None and times == 1:
            found = self.native.inputs(next_embeds, features, levels, hints)
        if found is not None:
            return found
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
        """Features of a level [..., D], plus a correction for the code drafted just before it; of both [..., H], H = config.turn.

        level_query: `down` of the features; prev_code: `before` of the code's embedding.
        """
        return features + self.up(F.silu(level_query + prev_code))

    def condition_on(self, features: Tensor, before: Tensor) -> Tensor:
        """Features of a level [..., D] and embeddings of the codes drafted before it [..., D] -> features [..., D]."""
        return self.combine(features, self.down(features), self.before(before))

    def forward_sequence(
        self,
        next_embeds: Tensor,
        features: Tensor,
        anchors: Tensor,
        levels: int,
        start: Tensor | None = None,
        hints: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """next_embeds [B, S, D], features [B, S, (1 + aux) D], anchors [B or 1, A] slots to draft from -> features after them.

        [B, S, D] of the first level, and [B, A, levels, D] of more: each query sees the slots up to its
        anchor and the queries between. Rows begin at start [B]; None: at slot 0. hints [B, S + A * levels, D].
        """
        count, times = next_embeds.shape[1], anchors.shape[1]
        x = self.inputs(next_embeds, features, levels, times, hints)
        out = self.decoder.forward_sequence(x, *branches(count, anchors, levels, start))
        return out[:, :count], out[:, count:].unflatten(1, (times, levels))


def branches(count: int, anchors: Tensor, levels: int, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Positions [b, N] and attention mask [b, 1, N, N] of `count` slots and of chains of `levels` nodes after some of them.

    N = count + A * levels. The chain after an anchor, of anchors [B or 1, A], sees the slots up to the anchor, and none
    of the other chains. Rows begin at start [B]; None: at slot 0.
    """
    device, rows = anchors.device, max(len(anchors), 1 if start is None else len(start))
    slots = torch.arange(count, device=device).expand(rows, -1)
    level = torch.arange(levels, device=device).repeat(anchors.shape[1]).expand(rows, -1)
    anchor = anchors.expand(rows, -1).repeat_interleave(levels, 1)
    none = torch.full_like(slots, -1)
    # the last slot that each node sees, and the anchor that it belongs to
    last, owner = torch.cat((slots, anchor), 1), torch.cat((none, anchor), 1)
    line = torch.arange(last.shape[1], device=device)
    known = (line < count) & (line <= last[..., None])
    if start is not None:
        known = known & (line >= start[:, None, None])
    rank = torch.cat((none, level), 1)
    own = (owner[..., None] == owner[:, None]) & (rank[..., None] >= rank[:, None]) & (line >= count)
    seen = known | own | (line[:, None] == line)  # a padding slot sees itself alone
    return torch.cat((slots, anchor + 1 + level), 1), seen[:, None]
