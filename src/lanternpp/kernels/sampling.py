"""Rows of V probabilities in C (`sampling.c`, `verify.c`), in float32 on a CPU: probabilities, draws, verification of drafts.

Each is many small operations over V codes, and for few rows starting PyTorch's takes longer than computing them.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, sizeof
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.kernels.memory import scratch
from lanternpp.kernels.structs import LANES, Children, Node, Rows, Verification, warp_of
from lanternpp.types import Draft, NeighbourBudget, Verdict, Warping, on_host


def takes(x: Tensor) -> bool:
    """Whether the kernels compute from these logits or probabilities."""
    return x.dtype == torch.float32 and on_host(x)


class NativeSampling:
    """The probabilities and draws of `Sampling`."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library

    def probs(self, logits: Tensor, warp: Warping) -> Tensor | None:
        """As `Sampling.probs`; warp: temperature, top-k and top-p."""
        if not takes(logits):
            return None
        logits = logits.contiguous()
        out, vocab, threads = torch.empty_like(logits), logits.shape[-1], torch.get_num_threads()
        work = Rows(
            rows=logits.numel() // vocab, codes=vocab, sampling=warp_of(warp), logits=logits, probs=out
        )
        work.scratch = scratch(self.library.row_bytes(vocab, 0, threads))
        self.library.row_probs(byref(work), threads)
        return out

    def children(self, q: Tensor, u: Tensor | None, count: int) -> Tensor | None:
        """q [..., V] -> the first `count` different codes drawn at u [..., M] uniform; without u the likeliest, [..., count]."""
        if not takes(q):
            return None
        q, vocab, each, threads = q.contiguous(), q.shape[-1], 0, torch.get_num_threads()
        if u is not None:
            u, each = u.contiguous(), u.shape[-1]
        out = torch.empty(*q.shape[:-1], count, dtype=torch.int64)
        work = Children(rows=q.numel() // vocab, codes=vocab, each=each, count=count, q=q, u=u, drawn=out)
        work.scratch = scratch(self.library.row_bytes(vocab, each, threads))
        self.library.draw_children(byref(work), threads)
        return out


class NativeVerifier:
    """The verifiers of `engine/verify`, for exact acceptance and for rules with neighbours."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library
        self._table: tuple[Tensor | None, Tensor | None] = (None, None)  # the last one, as given and by lanes
        self._limits: tuple[object, Tensor] = ((), torch.empty(0))  # the last ones

    def __call__(
        self,
        draft: Draft,
        logits: Tensor,
        warp: Warping,
        budget: NeighbourBudget,
        tokenwise: bool,
        u: Tensor,
        last: Tensor,
    ) -> tuple[Verdict, Tensor] | None:
        """Logits [B, N, V] -> the verdict, and the nodes as in C, [B, N, 5]; as `VerifyDraft`."""
        if not takes(logits):
            return None
        tree, (batch, nodes, vocab), threads = draft.tree, logits.shape, torch.get_num_threads()
        levels, ranks, table = len(tree.widths), tree.children.shape[2], budget.table
        if budget.limits != self._limits[0]:
            self._limits = budget.limits, torch.tensor(budget.limits, dtype=torch.float64)
        if table is not None and not tokenwise:
            if table is not self._table[0]:
                self._table = table, by_lanes(table)
            table = self._table[1]
        order = None if tokenwise or tree.layout is None else tree.layout.order
        q = None if draft.probs is None else draft.probs.to(logits.dtype)
        given = {"logits": logits, "q": q, "drawn": draft.codes, "children": tree.children, "order": order}
        given |= {"u": u, "last": last, "limit": self._limits[1], "table": table}
        work = verification(batch, nodes, vocab, ranks, levels, warp, budget, not tokenwise)
        for name, x in given.items():
            setattr(work, name, None if x is None else x.contiguous())
        work.scratch = scratch(self.library.row_bytes(vocab, 0, threads))
        run = self.library.verify_tokenwise if tokenwise else self.library.verify_joint
        run(byref(work), threads)
        kept = work.kept_alive
        verdict = Verdict(
            kept["path"], kept["kept"], kept["following"], kept["bonus"], None, kept["distribution"]
        )
        return verdict, kept["node"]


def verification(
    batch: int,
    nodes: int,
    vocab: int,
    ranks: int,
    levels: int,
    warp: Warping,
    budget: NeighbourBudget,
    joint: bool,
) -> Any:
    """The structure of C, with memory for what is written, and without what is read."""
    path, following = torch.empty(2, batch, levels + 1, dtype=torch.int64)
    kept, bonus = torch.empty(2, batch, dtype=torch.int64)
    sizes = {"batch": batch, "nodes": nodes, "codes": vocab, "ranks": ranks, "levels": levels}
    return Verification(
        sizes,
        near=0 if budget.table is None else budget.table.shape[1],
        optimal=budget.optimal,
        sampling=warp_of(warp),
        node=torch.empty(batch, nodes, sizeof(Node) // 8, dtype=torch.float64),
        distribution=torch.empty(batch, nodes, vocab) if joint else None,
        path=path,
        following=following,
        kept=kept,
        bonus=bonus,
    )


def by_lanes(table: Tensor) -> Tensor:
    """Neighbours [V, k] as `Verification` of verify.c has them, [up to V / LANES, k, LANES]."""
    padded = F.pad(table.int(), (0, 0, 0, -len(table) % LANES))
    return padded.view(-1, LANES, table.shape[1]).transpose(1, 2).contiguous()
