"""Observers of an engine: how often drafted codes are kept, and where the time of its steps goes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lanternpp.engine.decode import PHASES, Engine, Observer, Phase
from lanternpp.types import TargetOutput

TRIM = 0.2  # share of the steps left out of a mean at either end, as other work disturbs them


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


class Stopwatch(Observer):
    """Times the parts of an engine's steps; `rest` is the time of a run that is in no other part.

    On a GPU it puts events on the stream, so that the host does not wait for the device: a part's time then includes
    the time in which the device waits for the host.
    """

    def __init__(self, engine: Engine):
        self.cuda = engine.codes.device.type == "cuda"
        self.observed = 0.0  # seconds of the last `rest` that other observers took
        self._marks: list[tuple[Phase, Any]] = []
        engine.observers.append(self)

    def entered(self, phase: Phase) -> None:
        """Record when a phase begins."""
        now: Any = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
        if self.cuda:
            now.record()
        self._marks.append((phase, now))

    def take(self, seconds: float) -> dict[str, float]:
        """Seconds in each of PHASES since the last call, of a run that took `seconds` in all."""
        if self.cuda:
            torch.cuda.synchronize()
        seconds_in: dict[str, float] = dict.fromkeys((*PHASES, "observe"), 0.0)
        for (phase, began), (_, ended) in pairwise(self._marks):
            seconds_in[phase] += began.elapsed_time(ended) / 1000 if self.cuda else ended - began
        self._marks.clear()
        self.observed = seconds_in.pop("observe")
        seconds_in["rest"] = max(seconds - sum(seconds_in[phase] for phase in PHASES[:-1]), 0.0)
        return seconds_in


class TimedEngine:
    """An engine whose steps are timed. It must be new."""

    def __init__(self, engine: Engine):
        self.engine, self.watch = engine, Stopwatch(engine)
        self.rows = engine.guidance.branches * engine.batch * engine.proposer.size  # of the target's pass

    def admit(self, conditions: Sequence[str | None], seeds: Sequence[int]) -> float:
        """A whole batch enters; seconds per sample."""
        began = now(self.engine)
        for slot, (condition, seed) in enumerate(zip(conditions, seeds, strict=True)):
            self.engine.admit(slot, condition, seed)
        begin = now(self.engine) - began
        self.watch.take(begin)
        return begin / self.engine.batch

    def step(self) -> dict[str, float]:
        """One step: seconds in each of PHASES, without the time of its observers."""
        began = now(self.engine)
        self.engine.step()
        span = self.watch.take(now(self.engine) - began)
        return span | {"rest": span["rest"] - self.watch.observed}

    def midway_step(self, first: bool = False) -> tuple[float, float]:
        """One step from the middle of the picture, whose time does not depend on the codes: its seconds, and those of the target's
        pass in it. first: as `move_midway` has it.
        """
        self.move_midway(first)
        span = self.step()
        return sum(span.values()), span["pass"]

    def move_midway(self, first: bool = False) -> None:
        """Move every sample, admitted or not, to the middle of its picture; the slots of the caches need hold no keys.

        first: write to the slots before it, as memory that was never written is read from one page.
        """
        engine = self.engine
        half = engine.target.length // 2
        engine.count.fill_(half)
        engine.passes.fill_(1)
        engine.proposer.count.fill_(half)
        for cache in (engine.cache, getattr(engine.proposer, "cache", None)):
            if cache is not None:
                cache.used.fill_(engine.target.slots + half)
                if first:
                    cache.kv[..., : engine.target.slots + half, :].zero_()


def trimmed(values: Sequence[float]) -> float:
    """The mean without the `TRIM` least and greatest."""
    ordered = sorted(values)
    left_out = int(len(ordered) * TRIM)
    inner = ordered[left_out : len(ordered) - left_out]
    return sum(inner) / len(inner)


def now(engine: Engine) -> float:
    """Seconds on a clock, once the engine's device has nothing left to do."""
    if engine.codes.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
