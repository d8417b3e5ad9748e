"""The KV cache: allocated once at full size, written by index; accepted nodes are moved into place."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.nn.decoder import DecoderConfig
from lanternpp.types import Nodes, on_host
from lanternpp.util.devices import check_memory

HEAD_ALIGN = 32  # channels of a head lie in memory up to a multiple of this
TILES = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()  # a private probe, which may go away


class Cache:
    """Keys and values of R rows in S slots; `used` counts the slots of each row that hold decided codes."""

    def __init__(self, config: DecoderConfig, rows: int, slots: int, like: Tensor, more: int = 0):
        """more: bytes that passes with this cache take besides. InputError where there is no memory for both."""
        # Kernels read whole vectors of a head's channels; PyTorch's attention reads the first `head_dim`.
        self._channels, padded = config.head_dim, -(-config.head_dim // HEAD_ALIGN) * HEAD_ALIGN
        shape = (config.layers, 2, rows, config.num_kv_heads, slots, padded)
        check_memory(
            math.prod(shape) * like.element_size() + more, like.device, f"a KV cache of {rows:,} rows"
        )
        self.kv = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.start = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self.used = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self._row = torch.arange(rows, device=like.device)[:, None]  # [R, 1]
        self._slots = torch.arange(slots, device=like.device)  # [S]

    def nodes(self, depth: Tensor, mask: Tensor, scratch: Tensor | None = None) -> Nodes:
        """Slots, positions and attention mask for N nodes after the decided codes.

        depth [R, N]; mask [R, N, M] bool over M scratch slots; scratch [R, N] the scratch slot of each
        node (default: its index).
        """
        used = self.used[:, None]
        own = torch.arange(depth.shape[1], device=depth.device)[None] if scratch is None else scratch
        decided = (self._slots >= self.start[:, None]) & (self._slots < used)  # [R, S]
        seen = decided[:, None].expand(-1, depth.shape[1], -1).contiguous()
        where = used + torch.arange(mask.shape[2], device=depth.device)  # [R, M]
        seen.scatter_(2, where[:, None].expand(-1, depth.shape[1], -1), mask)
        return Nodes(position=used + depth, slot=used + own, mask=seen[:, None])

    def computed(self, run: Callable[[Tensor], Tensor]) -> Tensor:
        """What `run` returns for all keys and values, [L, 2, R, Hkv, S, d]."""
        return run(self.kv)

    def attend(self, layer: int, nodes: Nodes, mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [R, N, Hkv, d] at their slots; attend with q [R, N, H, d] over every slot."""
        self.store(layer, self._row, nodes.slot, k, v)
        keys, values = self.kv[layer, ..., : self._channels]
        return attention(q.transpose(1, 2), keys, values, mask).transpose(1, 2)

    def store(self, layer: int, rows: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k and v [r, N, Hkv, d] of rows [r, 1] at slots [r, N]."""
        for kind, x in enumerate((k, v)):
            self.kv[layer, kind, ..., : self._channels].transpose(1, 2).index_put_((rows, slots), x)

    def commit(self, path: Tensor | None, kept: Tensor) -> None:
        """Move the accepted nodes, path [R, P], to the slots after `used`, which grows by kept [R].

        path None: the nodes are in these slots already, as those of a chain are.
        """
        if path is not None:  # the root, its first node, is in its place
            path = path[:, 1 : int(kept.max()) if on_host(kept) else None]
            source = self.used[:, None] + path
            target = self.used[:, None] + torch.arange(1, path.shape[1] + 1, device=path.device)
            kv = self.kv.transpose(3, 4)
            kv[:, :, self._row, target] = kv[:, :, self._row, source]
        self.used += kept

    def rows(self, rows: Tensor, start: Tensor, count: int) -> RowCache:
        """The rows [r] of one sample, for a prefill of `count` slots; those before start [r] are padding."""
        self.start[rows] = start
        self.used[rows] = count
        return RowCache(self, rows, start, count)


class RowCache:
    """Some rows of a cache during their prefill, where attention is over the prompt alone."""

    def __init__(self, cache: Cache, rows: Tensor, start: Tensor, count: int):
        self._cache, self._rows, self._start, self._count = cache, rows[:, None], start, count

    def nodes(self) -> Nodes:
        """Slots, positions and mask for the whole prompt; a padding slot attends to itself alone."""
        slot = torch.arange(self._count, device=self._rows.device).expand(len(self._rows), -1)
        seen = slot[:, None] >= self._start[:, None, None]
        mask = torch.ones(self._count, self._count, dtype=torch.bool, device=slot.device).tril()
        own = torch.eye(self._count, dtype=torch.bool, device=slot.device)
        return Nodes(slot, slot, ((seen & mask) | own)[:, None])

    def computed(self, run: Callable[[Tensor], Tensor]) -> Tensor:
        """What `run` returns for the keys and values of the prompt, which go to the cache then."""
        rows, kv = self._rows[:, 0], self._cache.kv
        own = kv.new_empty(*kv.shape[:2], len(rows), kv.shape[3], self._count, kv.shape[5])
        out = run(own)
        kv[:, :, rows, :, : self._count] = own
        return out

    def attend(self, layer: int, nodes: Nodes, mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, and attend over them alone."""
        self._cache.store(layer, self._rows, nodes.slot, k, v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return attention(q, k, v, mask).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [R, H, N, d], k and v [R, Hkv, S, d], mask [R, 1, N, S] added to the scores -> [R, H, N, d].

    On a CPU without tiles for bfloat16 the fused kernel takes 380 us for one query over 290 slots (an EPYC),
    three plain products 97.
    """
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and not TILES:
        return plain(q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`attention` as separate matrix products."""
    count, kv_heads = q.shape[2], k.shape[1]
    q = (q * q.shape[-1] ** -0.5).unflatten(1, (kv_heads, -1)).flatten(2, 3)  # [R, Hkv, H / Hkv * N, d]
    scores = (q @ k.transpose(-1, -2)).unflatten(2, (-1, count)) + mask[:, :, None]
    y = scores.softmax(-1).flatten(2, 3) @ v
    return y.unflatten(2, (-1, count)).flatten(1, 2)
