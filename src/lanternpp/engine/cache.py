"""The KV cache: allocated once at full size, written by index; accepted nodes are moved into place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.nn.decoder import DecoderConfig, plain_attention
from lanternpp.types import Nodes, on_host
from lanternpp.util.devices import check_memory

HEAD_ALIGN = 32  # channels of a head lie in memory up to a multiple of this
SLOT_ALIGN = 16  # of a GPU's masks: others are copied by the memory-efficient attention of every layer
CHUNK = 2048  # prompt slots in one pass: masks and scores grow by the square
TILES = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()  # a private probe, which may go away


class Cache:
    """Keys and values of R rows in S slots; `used` counts the slots of each row that hold decided codes."""

    def __init__(
        self, config: DecoderConfig, rows: int, slots: int, like: Tensor, more: int = 0, ranks: int = 1
    ):
        """more: bytes that passes with this cache take besides; ranks: as of `Decoder`. InputError where there is no memory for both."""
        # Kernels read whole vectors of a head's channels; PyTorch's attention reads the first `head_dim`.
        self._channels, padded = config.head_dim, -(-config.head_dim // HEAD_ALIGN) * HEAD_ALIGN
        slots = slots if like.device.type == "cpu" else -(-slots // SLOT_ALIGN) * SLOT_ALIGN
        shape = (config.layers, 2, rows, config.num_kv_heads // ranks, slots, padded)
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
        count = depth.shape[1]
        own = self._slots[:count] if scratch is None else scratch
        decided = (self._slots >= self.start[:, None]) & (self._slots < used)  # [R, S]
        where = used + self._slots[: mask.shape[2]]  # [R, M]
        # Not in place: torch.compile subtracts booleans where it undoes an `expand` of one node.
        seen = decided[:, None].expand(-1, count, -1).scatter(2, where[:, None].expand(-1, count, -1), mask)
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

    def prefill(self, run: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Tensor:
        """What `run` returns for inputs [r, T, D], their nodes and this cache, in passes of at most `CHUNK` slots: [r, T, D]."""
        found = []
        for first in range(0, self._count, CHUNK):
            last = min(first + CHUNK, self._count)
            found.append(run(*(x[:, first:last] for x in inputs), self.nodes(first, last), self, **options))
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def nodes(self, first: int = 0, last: int | None = None) -> Nodes:
        """Position, slots and mask of prompt slots, by default of all; a padding slot attends to itself alone."""
        slots = torch.arange(self._count, device=self._rows.device)
        own = slots[first:last]
        mask = (slots <= own[:, None]) & (slots >= self._start[:, None, None]) | (slots == own[:, None])
        place = own.expand(len(self._rows), -1)
        return Nodes(place, place, mask[:, None])

    def computed(self, run: Callable[[Tensor], Tensor]) -> Tensor:
        """What `run` returns for the keys and values of the prompt, which go to the cache then."""
        rows, kv = self._rows[:, 0], self._cache.kv
        shape = *kv.shape[:2], len(rows), kv.shape[3], self._count, kv.shape[5]
        own = kv.new_zeros(shape) if self._count <= CHUNK else kv[:, :, rows, :, : self._count]
        out = run(own)
        kv[:, :, rows, :, : self._count] = own
        return out

    def attend(self, layer: int, nodes: Nodes, mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, and attend over the prompt alone."""
        self._cache.store(layer, self._rows, nodes.slot, k, v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self._count > k.shape[2]:
            k, v = self._cache.kv[layer, :, self._rows[:, 0], :, : self._count, : k.shape[3]]
        return attention(q, k, v, mask).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [R, H, N, d], k and v [R, Hkv, S, d], mask [R, 1, N, S] added to the scores -> [R, H, N, d].

    On a CPU without tiles for bfloat16 the fused kernel takes 380 us for one query over 290 slots (an EPYC),
    three plain products 97. No fused kernel of a GPU takes both masks and fewer heads of keys.
    """
    gqa = q.shape[1] != k.shape[1]
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and not TILES:
        return grouped(plain_attention, q, k, v, mask)
    if q.device.type == "cuda" and gqa:
        return grouped(F.scaled_dot_product_attention, q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=gqa)


def grouped(run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`attention` by run(q, k, v, mask) with as many heads of q as of k: the queries of heads that share keys are laid in a row."""
    heads, count = k.shape[1], q.shape[2]
    times = q.shape[1] // heads
    q = q.unflatten(1, (heads, times)).flatten(2, 3)
    mask = mask if times == 1 else mask.repeat(1, 1, times, 1)
    return run(q, k, v, mask).unflatten(2, (times, count)).flatten(1, 2)
