"""The verification of drafts in C (`verify.c`), in float32 on a CPU: laws of relaxed rules, walks, block and traversal verification.

They are many small operations over V codes, and for few rows starting PyTorch's takes longer than computing them.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_double, c_int64, c_void_p, sizeof

import torch
from torch import Tensor

from lanternpp.kernels.chain import LANES, Warp, fits, row_scratch, struct_of
from lanternpp.kernels.layout import pad
from lanternpp.types import Draft, NeighbourBudget, Verdict, Warping


class Node(Structure):
    """`Node` of verify.c."""

    _fields_ = (
        *((name, c_double) for name in ("begin", "end", "behind")),
        *((name, c_int64) for name in ("parent", "depth")),
    )


class Verification(Structure):
    """`Verification` of verify.c."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "nodes", "codes", "ranks", "levels", "near", "optimal")),
        ("sampling", Warp),
        *((name, c_void_p) for name in ("logits", "q", "drawn", "children", "order", "u", "last")),
        *((name, c_void_p) for name in ("limit", "table", "node", "law")),
        *((name, c_void_p) for name in ("path", "following", "kept", "bonus", "scratch")),
    )


class NativeVerifier:
    """The verifiers of `engine/verify/choose.py`, for exact acceptance and for rules whose neighbours lend."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library
        self._table: tuple[Tensor | None, Tensor | None] = (None, None)  # the last one, as given and by lanes
        self._limits: tuple[object, Tensor] = ((), torch.empty(0))  # the last ones

    def takes(self, logits: Tensor) -> bool:
        """Whether it verifies drafts with logits [B, N, V]."""
        return fits(logits)

    def __call__(
        self,
        draft: Draft,
        logits: Tensor,
        warp: Warping,
        budget: NeighbourBudget,
        walk: bool,
        u: Tensor,
        last: Tensor,
    ) -> tuple[Verdict, Tensor] | None:
        """Logits [B, N, V] -> the verdict, and the nodes as in C, [B, N, 5].

        u and last [B, 1] are uniform. walk: as `verify_tokenwise`, with u [B, levels, K]; else as `verify_joint`
        with u [B, 1].
        """
        if not self.takes(logits):
            return None
        tree, (batch, nodes, vocab) = draft.tree, logits.shape
        levels, ranks = len(tree.widths), tree.children.shape[2]
        if budget.limits != self._limits[0]:
            self._limits = budget.limits, torch.tensor(budget.limits, dtype=torch.float64)
        table, near = budget.table, 0 if budget.table is None else budget.table.shape[1]
        if table is not None and not walk:
            if table is not self._table[0]:
                self._table = table, by_lanes(table)
            table = self._table[1]
        order = None if walk or tree.layout is None else tree.layout.order
        q = None if draft.probs is None else draft.probs.to(logits.dtype)
        given = (logits, q, draft.codes, tree.children, order, u, last, self._limits[1], table)
        law = None if walk else torch.empty(batch, nodes, vocab)
        known = torch.empty(batch, nodes, sizeof(Node) // 8, dtype=torch.float64)
        path, following = torch.empty(2, batch, levels + 1, dtype=torch.int64)
        kept, bonus = torch.empty(2, batch, dtype=torch.int64)
        inputs = [None if x is None else x.contiguous() for x in given]
        threads = torch.get_num_threads()
        scratch = row_scratch(self.library, vocab, threads)
        places = (*inputs, known, law, path, following, kept, bonus, scratch)
        sizes = (batch, nodes, vocab, ranks, levels, near, budget.optimal)
        work = Verification(*sizes, struct_of(warp), *(None if x is None else x.data_ptr() for x in places))
        (self.library.verify_tokenwise if walk else self.library.verify_joint)(byref(work), threads)
        return Verdict(path, kept, following, bonus, None, law), known


def by_lanes(table: Tensor) -> Tensor:
    """Neighbours [V, k] as `Laws` of verify.c has them, [up to V / LANES, k, LANES]."""
    return pad(table.int(), LANES).view(-1, LANES, table.shape[1]).transpose(1, 2).contiguous()
