"""Observers of an engine: callbacks for every admitted sample and every pass, which must not change what they are given."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lanternpp.types import Admission, TargetOutput

Phase = Literal["draft", "pass", "verify", "observe", "rest"]


class Observer:
    """Base class: an engine calls the methods of all in its `observers`; here they do nothing."""

    def entered(self, phase: Phase) -> None:
        """A phase of a step or of an admission begins, and the one before it ends."""

    def admitted(self, new: Admission) -> None:
        """A sample has entered, and its first code is decided."""

    def verified(self, output: TargetOutput, count: Tensor) -> None:
        """A draft is verified and nothing of it is committed yet; count [B] codes are decided so far."""


class AcceptanceByRank(Observer):
    """Counts how often children are kept, by the depth of their parent and their rank among its children.

    tried: the children that verification came to, their parent kept and no sibling before them. kept: the tried children
    that were kept. A child that repeats a sibling's code, because the drafter had no other to offer, is not tried; it
    counts as rejected, since the tree search needs the value of a place in the tree, and such a place was in the draft and
    decided nothing. Passes without room for all levels are not counted, as nodes after the end of an image are not
    rejected. Counts stay on the device.
    """

    tried: Tensor  # [D, K] int64; there from the first pass on, as are the others
    kept: Tensor  # [D, K] int64
    passes: Tensor  # [] int64 that were counted, all samples together
    codes: Tensor  # [] int64 that these decided

    def __init__(self, length: int):
        self.length = length  # codes of an image

    def verified(self, output: TargetOutput, count: Tensor) -> None:
        """Count the children along every kept path."""
        verdict, table = output.verdict, output.draft.tree.children
        above, below = verdict.path[:, :-1], verdict.path[:, 1:, None]
        depth, ranks = above.shape[1], table.shape[2]
        if not hasattr(self, "tried"):
            self.tried = torch.zeros(depth, ranks, dtype=torch.int64, device=count.device)
            self.kept = torch.zeros_like(self.tried)
            self.passes, self.codes = torch.zeros_like(count[0]), torch.zeros_like(count[0])
        room = count + depth + 1 <= self.length  # [B]
        level = torch.arange(depth, device=count.device)
        reached = (verdict.kept[:, None] > level) & room[:, None]  # [B, D] whether the parent was kept
        children = table.gather(1, above[..., None].expand(-1, -1, ranks))  # [B, D, K]
        good = (children == below) & (verdict.kept[:, None] > level + 1)[..., None]
        first = good.cumsum(-1) - good.long() == 0  # no sibling before it was kept
        tried = (children >= 0) & first & reached[..., None]
        self.tried += tried.sum(0)
        self.kept += (tried & good).sum(0)
        self.passes += room.sum()
        self.codes += (verdict.kept * room).sum()
