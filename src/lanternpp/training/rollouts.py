"""Runs of a target with a drafter, recorded: what the target showed in every pass, kept or refused.

A drafter that hears what the target thought of refused codes can only learn it from runs of that kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lanternpp.accept.exact import Exact
from lanternpp.drafters.base import QueryDrafter
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.proposers.parallel import Parallel
from lanternpp.targets.base import Target
from lanternpp.training.codes import Codes, Split
from lanternpp.training.features import Captions
from lanternpp.training.parallel import Lessons, ParallelSettings, ParallelTask
from lanternpp.trees.shapes import chain
from lanternpp.trees.static import StaticTree
from lanternpp.types import Admission, Look


@dataclass(frozen=True)
class Rollout:
    """One picture drawn without loss, over C passes, from chains of N - 1 guesses."""

    text: str | None
    codes: Tensor  # [length] int32
    kept: Tensor  # [C] int16 codes decided by each pass after the prefill
    features: Tensor  # [C, N, D] guided, of every node of each pass, in the target's own dtype
    prompt: Tensor  # [T, D] guided
    start: int  # the first slot of the conditional prompt


class Recorder(Parallel):
    """A proposer that keeps what each pass showed, by slot of the batch."""

    def __init__(self, drafter: QueryDrafter, depth: int):
        super().__init__(drafter, StaticTree(chain(depth)))
        self.passes: dict[int, list[tuple[int, Tensor]]] = {}
        self.prompts: dict[int, tuple[Tensor, int]] = {}

    def begin(self, new: Admission) -> None:
        """A sample enters."""
        super().begin(new)
        self.passes[new.slot] = []
        features = self.guidance.merge(new.features)[0].to(new.features.dtype)
        self.prompts[new.slot] = features, int(new.prompt.start[0])

    def observe(self, look: Look) -> None:
        """A pass ends."""
        features = self.guidance.merge(look.features).to(look.features.dtype)
        for slot, kept in enumerate(look.verdict.kept.tolist()):
            if kept:
                self.passes[slot].append((kept, features[slot].clone()))
        super().observe(look)


def record(
    target: Target,
    drafter: QueryDrafter,
    texts: Sequence[str | None],
    cfg: float,
    depth: int,
    batch: int = 16,
    seed: int = 0,
) -> Iterator[Rollout]:
    """A rollout per text, as they finish; seeds run from `seed` on."""
    recorder = Recorder(drafter, depth)
    engine = Engine(target, recorder, Exact(), Sampling(), Guidance(cfg), batch)
    waiting, running = list(range(len(texts))), dict[int, int]()
    while waiting or running:
        for slot in engine.done():
            if slot in running:
                yield _rollout(engine, recorder, slot, texts[running.pop(slot)])
            if waiting:
                running[slot] = waiting.pop(0)
                engine.admit(slot, texts[running[slot]], seed + running[slot])
        if running:
            engine.step()


def _rollout(engine: Engine, recorder: Recorder, slot: int, text: str | None) -> Rollout:
    kept, features = zip(*recorder.passes[slot], strict=True)
    prompt, start = recorder.prompts[slot]
    codes = engine.harvest(slot).codes.to(torch.int32)
    return Rollout(text, codes, torch.tensor(kept, dtype=torch.int16), torch.stack(features), prompt, start)


def replay(rollout: Rollout, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Guided features [S, D] of all slots, the slots [C] drafts began behind, and their hints [C, levels, D]."""
    depth = rollout.features.shape[1] - 1
    kept = rollout.kept.long()
    node = torch.arange(depth + 1)
    decided = rollout.features[node < kept[:, None]]  # [sum of kept, D], in order
    features = torch.cat((rollout.prompt, decided))
    anchors = len(rollout.prompt) - 1 + torch.cat((kept.new_zeros(1), kept.cumsum(0)[:-1]))
    place = kept[:-1, None] + torch.arange(levels)  # nodes behind those a pass decided
    there = place <= depth
    found = rollout.features[:-1].gather(
        1, place.clamp(max=depth)[..., None].expand(-1, -1, features.shape[-1])
    )
    hints = torch.cat((torch.zeros_like(found[:1]), found * there[..., None]))
    return features, anchors, hints


class RolloutTask(ParallelTask):
    """A parallel drafter that learns from recorded runs: drafts begin where they did, with the hints they had."""

    def __init__(
        self,
        settings: ParallelSettings,
        layers: int,
        target: Target,
        rollouts: Sequence[Rollout],
        held_out: int,
        data: dict[str, str],
        origin: str,
        device: torch.device,
    ):
        self.rollouts = rollouts[held_out:], rollouts[:held_out]
        codes = Codes(_split(self.rollouts[0]), _split(self.rollouts[1]), data)
        super().__init__(settings, layers, target, codes, origin, device)

    def read(self, step: int) -> Lessons:
        """Some runs, and some of their passes."""
        index, _, generator = self.order(step)
        return self.drafts(self.train, self.rollouts[0], index, generator)

    def examine(self) -> Iterator[Lessons]:
        """The runs held out, passes spread over them."""
        for part in torch.arange(len(self.rollouts[1])).split(8):
            yield self.drafts(self.val, self.rollouts[1], part, torch.Generator().manual_seed(0))

    def drafts(
        self, captions: Captions, rollouts: Sequence[Rollout], index: Tensor, generator: torch.Generator
    ) -> Lessons:
        """Runs index [B], and `anchors` passes of each."""
        prompts, start = captions(index, 1)
        chosen = [rollouts[i] for i in index.tolist()]
        codes = torch.stack([rollout.codes for rollout in chosen]).to(self.device, torch.int64)
        embeds = self.target.embed(codes[:, :-1]).to(prompts.dtype)
        ahead = torch.cat((prompts, embeds), 1)[:, 1:]
        features, anchors, hints = [], [], []
        levels, most = self.options.levels, self.options.anchors
        for rollout in chosen:
            known, slots, told = replay(rollout, levels)
            pick = torch.randint(len(slots), (most,), generator=generator)
            pick = torch.randperm(len(slots), generator=generator)[:most] if len(slots) >= most else pick
            at_slots = torch.zeros_like(known[:-1])
            at_slots[slots] = told[:, 0]
            features.append(known)
            anchors.append(slots[pick])
            hints.append(torch.cat((at_slots, told[pick, 1:].flatten(0, 1))))
        stacked = (torch.stack(x).to(self.device) for x in (features, anchors, hints))
        known, slots, told = stacked
        known = known if known.element_size() == 8 else known.float()
        return Lessons(ahead, known, prompts.shape[1], start, slots, told.to(ahead.dtype))


def _split(rollouts: Sequence[Rollout]) -> Split:
    codes = torch.stack([rollout.codes for rollout in rollouts])[:, None]
    return Split(codes, tuple(rollout.text or "" for rollout in rollouts), ("",) * len(rollouts))
