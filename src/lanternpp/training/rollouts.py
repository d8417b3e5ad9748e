"""Training of a parallel drafter on recorded runs: drafts begin where they did, with the hints they had."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.drafters.parallel import ParallelDrafter
from lanternpp.errors import InputError
from lanternpp.nn import checkpoints
from lanternpp.nn.checkpoints import CONFIG, WEIGHTS, checksum, digest
from lanternpp.nn.sources import Source
from lanternpp.targets.base import Target
from lanternpp.training.features import Captions
from lanternpp.training.material.codes import Codes, Split
from lanternpp.training.material.gather import taught
from lanternpp.training.material.runs import Rollout, recorded, replay, runs_key
from lanternpp.training.material.samples import HELD, LEAST, MOST, Own, asked
from lanternpp.training.parallel import Lessons, ParallelSettings, ParallelTask
from lanternpp.training.run import Plan, run
from lanternpp.training.state import foresee


class RolloutTask(ParallelTask):
    """A parallel drafter that learns from recorded runs: drafts begin where they did, with the hints they had."""

    def __init__(
        self,
        settings: ParallelSettings,
        layers: int,
        target: Target,
        rollouts: Sequence[Rollout],
        held_out: int,
        data: dict[str, Any],
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


def train(
    data: Path | None,
    model: str | Path,
    settings: ParallelSettings,
    plan: Plan,
    count: int,
    own: Own | None = None,
    follow: bool = False,
    batch: int = 16,
    layers: int = 1,
) -> bool:
    """Go on with the parallel drafter in the plan's folder, on `count` runs of the target with it. False if interrupted.

    The captions of `data`, or what `own` asks for, are what is drawn. A drafter of fewer `layers` grows to so many.
    Its state lies in a folder of its own below, beside the drafter that it began with, and the weights are
    replaced at the end. Once ended, it does not go on from there unless it is restarted.
    """
    folder, below = plan.folder, replace(plan, folder=plan.folder / "rollouts")
    first = begun(folder, plan.restart)
    found = taught(model, folder, plan.device, None if follow else settings.cfg)
    words = asked(own or Own(), data, found.teacher.place, found.target)
    drafter = (
        ParallelDrafter.read(Source.open(first), found.target, found.teacher.dtype)
        .to(plan.device)
        .eval()
        .requires_grad_(False)
    )
    origin = digest(checksum(tensor) for tensor in drafter.state_dict().values())
    grown = grow(drafter, layers, found.target)
    levels = drafter.config.queries + 1
    held = min(max(LEAST, count // HELD), MOST)
    said = [words.val[i % len(words.val)] for i in range(held)]
    said += [words.train[i % len(words.train)] for i in range(count)]
    settings = replace(settings, cfg=found.cfg, levels=levels, turn=drafter.config.turn)
    name = runs_key(found, origin, said, levels, batch, settings.seed + 1)
    known = asdict(settings) | {"layers": len(grown.decoder.blocks), "target": found.origin, "data": name}
    foresee(below, known)
    runs = recorded(found, drafter, name, said, levels, batch, settings.seed + 1)
    target = found.teacher.again(found.target)
    facts = {"codes": name, "runs": count, "drafter": origin, "prompts": len(words.train)}
    if data is not None:
        facts["folder"] = data.resolve().name
    task = RolloutTask(
        settings, len(grown.decoder.blocks), target, runs, held, facts, found.origin, plan.device
    )
    task.model.load_state_dict(grown.state_dict())
    task.average.load_state_dict(grown.state_dict())
    if not run(task, below):
        return False
    exported, tensors = task.export()
    checkpoints.save(folder, exported, tensors, plan.store)
    shutil.copyfile(below.folder / "provenance.json", folder / "provenance.json")
    return True


def begun(folder: Path, restart: bool) -> Path:
    """A copy of the drafter that a training on rollouts began with, made now where it begins.

    InputError where there is no drafter, or it is neither that one nor what the training left.
    """
    first = folder / "rollouts" / "begin"
    if (first / CONFIG).is_file() and not restart:
        mine = sums(first), sums(folder / "rollouts")
        if (folder / CONFIG).is_file() and sums(folder) not in mine:
            raise InputError(
                f"{folder} holds another drafter than its rollouts began with: pass --restart to go on with it."
            )
        return first
    if not (folder / CONFIG).is_file():
        raise InputError(
            f"{folder} holds no parallel drafter to go on with: train one first, without --rollouts."
        )
    config, tensors = checkpoints.load(folder)
    checkpoints.save(first, config, tensors)
    return first


def sums(folder: Path) -> str | None:
    """A hash of the weights in a folder; None where there are none."""
    if not (folder / WEIGHTS).is_file():
        return None
    return digest(
        checksum(tensor.float())
        for _, tensor in sorted(checkpoints.read_safetensors(folder / WEIGHTS).items())
    )


def grow(drafter: ParallelDrafter, layers: int, target: Target) -> ParallelDrafter:
    """A drafter of at least so many layers in float32: those added change nothing until they are trained."""
    config, shape = drafter.config, drafter.config.decoder
    deeper = replace(config, decoder=replace(shape, layers=max(layers, shape.layers)))
    grown = ParallelDrafter(deeper, target.decoder.rotary_table)
    for name, parameter in grown.decoder.blocks[shape.layers :].named_parameters():
        if name.endswith(("wo.weight", "w2.weight")):
            nn.init.zeros_(parameter)
    grown.load_state_dict(
        {name: tensor.float() for name, tensor in drafter.state_dict().items()}, strict=False
    )
    return grown
