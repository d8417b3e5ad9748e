"""The KV cache: of final size from the start, written by index, committed by gather and scatter."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.nn.decoder import DecoderConfig
from lanternpp.types import Nodes

TILES = torch.cpu._is_amx_tile_supported()


class Cache:
    """Keys and values of R rows in S slots, and how many slots of each row are decided."""

    def __init__(self, config: DecoderConfig, rows: int, slots: int, like: Tensor):
        shape = (config.layers, 2, rows, slots, config.groups * config.head_dim)
        self.kv = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.groups, self.head_dim = config.groups, config.head_dim
        self.start = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self.used = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self._row = torch.arange(rows, device=like.device)[:, None]  # [R, 1]
        self._slots = torch.arange(slots, device=like.device)  # [S]

    def nodes(self, depth: Tensor, mask: Tensor, scratch: Tensor | None = None) -> Nodes:
        """Places for N nodes after what is decided.

        depth [R, N]; mask [R, N, M] bool over M scratch slots; scratch [R, N] the scratch slot of each
        node (default: its index).
        """
        used = self.used[:, None]
        own = torch.arange(depth.shape[1], device=depth.device)[None] if scratch is None else scratch
        decided = (self._slots >= self.start[:, None]) & (self._slots < used)  # [R, S]
        seen = decided[:, None].repeat(1, depth.shape[1], 1)
        where = used + torch.arange(mask.shape[2], device=depth.device)  # [R, M]
        seen.scatter_(2, where[:, None].expand(-1, depth.shape[1], -1), mask)
        return Nodes(position=used + depth, slot=used + own, mask=seen[:, None])

    def attend(self, layer: int, nodes: Nodes, mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [R, N, Hkv, d] at their slots; attend with q [R, N, H, d] over every slot."""
        for kind, x in enumerate((k, v)):
            self.kv[layer, kind].index_put_((self._row, nodes.slot), x.flatten(2))
        keys, values = self.kv[layer].unflatten(-1, (self.groups, self.head_dim)).transpose(2, 3)
        return attention(q.transpose(1, 2), keys, values, mask).transpose(1, 2)

    def commit(self, path: Tensor, kept: Tensor) -> None:
        """Move the kept nodes, path [R, P], behind what is decided; kept [R] of them now count."""
        source = self.used[:, None] + path
        target = self.used[:, None] + torch.arange(path.shape[1], device=path.device)
        self.kv[:, :, self._row, target] = self.kv[:, :, self._row, source]
        self.used += kept

    def rows(self, rows: Tensor, start: Tensor, count: int) -> RowCache:
        """The rows [r] of one sample, emptied, for a prefill of `count` slots that begin to count at start [r]."""
        self.start[rows] = start
        self.used[rows] = count
        return RowCache(self, rows, start, count)


class RowCache:
    """Some rows of a cache during their prefill: nothing but the prompt itself can be seen yet."""

    def __init__(self, cache: Cache, rows: Tensor, start: Tensor, count: int):
        self._cache, self._rows, self._start, self._count = cache, rows[:, None], start, count

    def nodes(self) -> Nodes:
        """Places for the whole prompt; a padding slot sees itself alone."""
        slot = torch.arange(self._count, device=self._rows.device).expand(len(self._rows), -1)
        seen = slot[:, None] >= self._start[:, None, None]
        mask = torch.ones(self._count, self._count, dtype=torch.bool, device=slot.device).tril()
        own = torch.eye(self._count, dtype=torch.bool, device=slot.device)
        return Nodes(slot, slot, ((seen & mask) | own)[:, None])

    def attend(self, layer: int, nodes: Nodes, mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, and attend over them alone."""
        for kind, x in enumerate((k, v)):
            self._cache.kv[layer, kind].index_put_((self._rows, nodes.slot), x.flatten(2))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return attention(q, k, v, mask).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [R, H, N, d], k and v [R, Hkv, S, d], mask [R, 1, N, S] added to the scores -> [R, H, N, d].

    One bfloat16 query on a CPU without tiles for it takes three times as long as two (260 against 85 us over
    290 slots of an EPYC), so it goes as two.
    """
    count = q.shape[2]
    if count == 1 and q.dtype == torch.bfloat16 and q.device.type == "cpu" and not TILES:
        q = torch.cat((q, q), 2)
    y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])
    return y[:, :, :count]
