"""Observers of an engine: how often drafted codes are kept, and how long the parts of its steps take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lanternpp.engine.compiled import warm_up
from lanternpp.engine.decode import PHASES, Engine, Observer, Phase
from lanternpp.types import TargetOutput

TRIM = 0.2  # share of the values left out of a mean at either end, as other work disturbs some steps


class AcceptanceByRank(Observer):
    """Counts how often children are kept, by the depth of their parent and their rank among its children.

    tried: the children whose parent was kept and whose earlier siblings were not. kept: the tried children that were kept.
    Verification skips a child that repeats a sibling's code, because the drafter had no other to offer; such a child counts as
    tried and rejected, since the tree search needs the value of its position in the tree. Passes without room for all levels
    are not counted, as nodes after the end of an image are not rejected. Counts stay on the device.
    """

    tried: Tensor  # [D, K] int64; set in the first pass, as the other counts are
    kept: Tensor  # [D, K] int64
    passes: Tensor  # [] int64 counted passes of all samples
    codes: Tensor  # [] int64 codes that the counted passes decided

    def __init__(self, length: int):
        self.length = length  # codes of an image

    def verified(self, output: TargetOutput, count: Tensor) -> None:
        """Count the children along every kept path."""
        verdict, tree = output.verdict, output.draft.tree
        parent = verdict.path[:, :-1]  # [B, D]
        depth, ranks = parent.shape[1], tree.children.shape[2]
        if not hasattr(self, "tried"):
            self.tried = torch.zeros(depth, ranks, dtype=torch.int64, device=count.device)
            self.kept = torch.zeros_like(self.tried)
            self.passes, self.codes = torch.zeros_like(count[0]), torch.zeros_like(count[0])
        counted = count + depth + 1 <= self.length  # [B] passes with room for all levels
        level = torch.arange(depth, device=count.device)
        parent_kept = (verdict.kept[:, None] > level) & counted[:, None]  # [B, D]
        children = tree.children.gather(1, parent[..., None].expand(-1, -1, ranks))  # [B, D, K]
        kept = (children == verdict.path[:, 1:, None]) & (verdict.kept[:, None] > level + 1)[..., None]
        no_sibling_kept = kept.cumsum(-1) - kept.long() == 0  # of the earlier siblings
        tried = (children >= 0) & no_sibling_kept & parent_kept[..., None]
        self.tried += tried.sum(0)
        self.kept += (tried & kept).sum(0)
        self.passes += counted.sum()
        self.codes += (verdict.kept * counted).sum()


class Stopwatch(Observer):
    """Times the phases of an engine's steps; `rest` is the time of a run that is in no other phase and in no other observer.

    On a GPU events are put on the stream, so that the host does not wait for the device: the time of a phase includes the
    time in which the device waits for the host.
    """

    def __init__(self, engine: Engine):
        self.device = engine.codes.device
        self.cuda = self.device.type == "cuda"
        self._marks: list[tuple[Phase, Any]] = []
        engine.observers.append(self)

    def entered(self, phase: Phase) -> None:
        """Record when a phase begins."""
        mark: Any = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
        if self.cuda:
            mark.record(torch.cuda.current_stream(self.device))
        self._marks.append((phase, mark))

    def take(self, seconds: float) -> dict[str, float]:
        """Return the seconds in each of PHASES since the last call, of a run that took `seconds` in all."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        seconds_in: dict[str, float] = dict.fromkeys((*PHASES, "observe"), 0.0)
        for (phase, start), (_, end) in pairwise(self._marks):
            seconds_in[phase] += start.elapsed_time(end) / 1000 if self.cuda else end - start
        self._marks.clear()
        rest = max(seconds + seconds_in["rest"] - sum(seconds_in.values()), 0.0)
        del seconds_in["observe"]
        return seconds_in | {"rest": rest}


class TimedEngine:
    """A new engine whose steps are timed."""

    def __init__(self, engine: Engine):
        warm_up(engine)
        self.engine, self.watch = engine, Stopwatch(engine)
        self.rows = engine.guidance.branches * engine.batch * engine.proposer.size  # of the target's pass

    def admit(self, conditions: Sequence[str | None], seeds: Sequence[int]) -> float:
        """Admit a batch; return the seconds per sample."""
        start = synchronized_time(self.engine)
        for slot, (condition, seed) in enumerate(zip(conditions, seeds, strict=True)):
            self.engine.admit(slot, condition, seed)
        seconds = synchronized_time(self.engine) - start
        self.watch.take(seconds)
        return seconds / self.engine.batch

    def step(self) -> dict[str, float]:
        """Take a step; return the seconds in each of PHASES, without the time of its observers."""
        start = synchronized_time(self.engine)
        self.engine.step()
        return self.watch.take(synchronized_time(self.engine) - start)

    def midway_step(self, zero_cache: bool = False) -> tuple[float, float]:
        """Take a step after `move_midway`, so that its time does not depend on codes; return its seconds, and the target's."""
        self.move_midway(zero_cache)
        seconds_in = self.step()
        return sum(seconds_in.values()), seconds_in["pass"]

    def move_midway(self, zero_cache: bool = False) -> None:
        """Move every sample, admitted or not, to the middle of its picture; the slots of the caches need hold no keys.

        zero_cache: write to the earlier slots, since memory that was never written is read from a single page.
        """
        engine = self.engine
        half = engine.target.length // 2
        engine.count.fill_(half)
        engine.passes.fill_(1)
        engine.proposer.count.fill_(half)
        for cache in (engine.cache, getattr(engine.proposer, "cache", None)):
            if cache is not None:
                cache.used.fill_(engine.target.slots + half)
                if zero_cache:
                    cache.kv[..., : engine.target.slots + half, :].zero_()


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the `TRIM` least and greatest values."""
    num_trimmed = int(len(values) * TRIM)
    inner = sorted(values)[num_trimmed : len(values) - num_trimmed]
    return sum(inner) / len(inner)


def synchronized_time(engine: Engine) -> float:
    """Wait until the engine's device is idle; return the seconds of a clock."""
    if (device := engine.codes.device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
