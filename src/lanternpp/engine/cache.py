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
SLOT_ALIGN = 16  # slots on a GPU: the memory-efficient attention of every layer copies masks of other lengths
CHUNK = 2048  # prompt slots in one pass: masks and scores grow by the square of the slots
TILES = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()  # a private probe, which may go away


class Cache:
    """Keys and values of R rows in S slots; the first `used` slots of a row hold its prompt and decided codes."""

    def __init__(
        self, config: DecoderConfig, rows: int, slots: int, like: Tensor, extra_bytes: int = 0, ranks: int = 1
    ):
        """extra_bytes: of a pass with this cache; ranks: as of `Decoder`. Raise InputError where there is no memory for both."""
        # Kernels read whole vectors of a head's channels; PyTorch's attention reads the first `head_dim`.
        self._channels = config.head_dim
        padded = -(-config.head_dim // HEAD_ALIGN) * HEAD_ALIGN
        slots = slots if like.device.type == "cpu" else -(-slots // SLOT_ALIGN) * SLOT_ALIGN
        shape = (config.layers, 2, rows, config.num_kv_heads // ranks, slots, padded)
        check_memory(
            math.prod(shape) * like.element_size() + extra_bytes, like.device, f"a KV cache of {rows:,} rows"
        )
        self.kv = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.start = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self.used = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self._row = torch.arange(rows, device=like.device)[:, None]  # [R, 1]
        self._slots = torch.arange(slots, device=like.device)  # [S]
        self._layers = torch.arange(config.layers, device=like.device)
        self._keys_values = torch.arange(2, device=like.device)[:, None, None]

    def nodes(self, depth: Tensor, mask: Tensor, scratch: Tensor | None = None) -> Nodes:
        """Return slots, positions and attention mask for N nodes after the decided codes.

        depth [R, N]; mask [R, N, M] bool over M scratch slots, which follow the used slots; scratch [R, N] the scratch slot
        of each node (default: its index).
        """
        used = self.used[:, None]
        num_nodes = depth.shape[1]
        node_slot = self._slots[:num_nodes] if scratch is None else scratch
        decided = (self._slots >= self.start[:, None]) & (self._slots < used)  # [R, S]
        scratch_slots = used + self._slots[: mask.shape[2]]  # [R, M]
        # Not in place: torch.compile subtracts booleans where it undoes an `expand` of one node.
        full_mask = decided[:, None].expand(-1, num_nodes, -1)  # [R, N, S]
        full_mask = full_mask.scatter(2, scratch_slots[:, None].expand(-1, num_nodes, -1), mask)
        return Nodes(position=used + depth, slot=used + node_slot, mask=full_mask[:, None])

    def computed(self, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Return run(keys and values of all rows, [L, 2, R, Hkv, S, d])."""
        return run(self.kv)

    def attend(self, layer: int, nodes: Nodes, mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [R, N, Hkv, d] at their slots; attend with q [R, N, H, d] over every slot."""
        self.store(layer, self._row, nodes.slot, k, v)
        keys, values = self.kv[layer, ..., : self._channels]
        return attention(q.transpose(1, 2), keys, values, mask).transpose(1, 2)

    def store(self, layer: int, rows: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k and v [r, N, Hkv, d] of rows [r, 1] at slots [r, N]."""
        kv = torch.stack((k, v))
        if num_padding := self.kv.shape[-1] - self._channels:
            kv = F.pad(kv, (0, num_padding))
        # torch.compile copies a tensor that is written to through a view, and here that is all layers.
        index = [self._layers[layer], self._keys_values, rows, None, slots]
        torch.ops.aten.index_put_(self.kv, index, kv)

    def commit(self, path: Tensor | None, kept: Tensor) -> None:
        """Move the accepted nodes, path [R, P], to the slots after `used`, which grows by kept [R].

        path None: the nodes are in these slots already, as the nodes of a chain are.
        """
        if path is not None:  # the root, the first node of a path, is in its slot already
            path = path[:, 1 : int(kept.max()) if on_host(kept) else None]
            source = self.used[:, None] + path
            target = self.used[:, None] + torch.arange(1, path.shape[1] + 1, device=path.device)
            moved = self.kv[:, :, self._row, :, source]
            torch.ops.aten.index_put_(self.kv, [None, None, self._row, None, target], moved)
        self.used += kept

    def rows(self, rows: Tensor, start: Tensor, count: int) -> RowCache:
        """Return the rows [r] of one sample for a prefill of `count` slots; slots before start [r] are padding."""
        self.start[rows] = start
        self.used[rows] = count
        return RowCache(self, rows, start, count)


class RowCache:
    """The r rows of one sample during their prefill, where attention is over the prompt alone."""

    def __init__(self, cache: Cache, rows: Tensor, start: Tensor, count: int):
        self._cache, self._rows, self._start, self._count = cache, rows[:, None], start, count

    def prefill(self, run: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Tensor:
        """Call run(*inputs, nodes, this cache) with inputs [r, T, D] in chunks of at most `CHUNK` slots; return [r, T, D]."""
        outputs = []
        for start in range(0, self._count, CHUNK):
            end = min(start + CHUNK, self._count)
            outputs.append(run(*(x[:, start:end] for x in inputs), self.nodes(start, end), self, **options))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def nodes(self, start: int = 0, end: int | None = None) -> Nodes:
        """Return positions, slots and mask of prompt slots, by default of all; padding slots attend to padding alone."""
        keys = torch.arange(self._count, device=self._rows.device)  # [T]
        queries = keys[start:end]  # [N]
        is_padding = keys < self._start[:, None]  # [r, T]
        same_part = is_padding[:, start:end, None] == is_padding[:, None]  # [r, N, T]
        slots = queries.expand(len(self._rows), -1)
        return Nodes(slots, slots, (same_part & (keys <= queries[:, None]))[:, None])

    def computed(self, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Return run(keys and values of the prompt, [L, 2, r, Hkv, T, d]), and write them to the cache afterwards."""
        rows, kv = self._rows[:, 0], self._cache.kv
        if self._count <= CHUNK:
            prompt_kv = kv.new_zeros(*kv.shape[:2], len(rows), kv.shape[3], self._count, kv.shape[5])
        else:
            prompt_kv = kv[:, :, rows, :, : self._count]
        output = run(prompt_kv)
        kv[:, :, rows, :, : self._count] = prompt_kv
        return output

    def attend(self, layer: int, nodes: Nodes, mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [r, N, Hkv, d]; attend with q [r, N, H, d] over the prompt alone."""
        self._cache.store(layer, self._rows, nodes.slot, k, v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self._count > k.shape[2]:  # the prompt has earlier chunks
            k, v = self._cache.kv[layer, :, self._rows[:, 0], :, : self._count, : k.shape[3]]
        return attention(q, k, v, mask).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend with q [R, H, N, d] to k and v [R, Hkv, S, d], mask [R, 1, N, S] added to the scores: [R, H, N, d].

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
    """Compute `attention` by run(q, k, v, mask) with Hkv heads of q: heads of q that share keys become further queries."""
    kv_heads, num_queries = k.shape[1], q.shape[2]
    groups = q.shape[1] // kv_heads
    q = q.unflatten(1, (kv_heads, groups)).flatten(2, 3)  # [R, Hkv, groups N, d]
    if groups > 1:
        mask = mask.repeat(1, 1, groups, 1)
    return run(q, k, v, mask).unflatten(2, (groups, num_queries)).flatten(1, 2)
