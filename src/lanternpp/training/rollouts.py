"""Training of a parallel drafter on recorded runs: drafts begin where they did, with the hints they had."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.api.settings import resolve
from lanternpp.drafters.parallel import ParallelDrafter
from lanternpp.engine.sampling import Sampling
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn import checkpoints
from lanternpp.nn.checkpoints import CONFIG, WEIGHTS, checksum
from lanternpp.nn.sources import Source
from lanternpp.training.drafts import DraftBatch
from lanternpp.training.features import CaptionPrompts, slot_inputs, spread_aux_layers
from lanternpp.training.material.codes import Codes, Split
from lanternpp.training.material.gather import load_target
from lanternpp.training.material.runs import Rollout, RunOptions, recorded, replay, runs_key
from lanternpp.training.material.samples import (
    HELD_OUT,
    MAX_HELD_OUT,
    MIN_HELD_OUT,
    SelfSampling,
    choose_prompts,
)
from lanternpp.training.parallel import ParallelSettings, ParallelTask
from lanternpp.training.run import TrainingOptions, run
from lanternpp.training.state import check_resumable
from lanternpp.util.files import digest


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
        sampling: Sampling | None = None,
    ):
        self.rollouts = rollouts[held_out:], rollouts[:held_out]
        codes = Codes(_split(self.rollouts[0]), _split(self.rollouts[1]), data)
        super().__init__(settings, layers, target, codes, origin, device, sampling)

    def training_batch(self, step: int) -> DraftBatch:
        """Some runs, and some of their passes."""
        index, _, generator = self.sampler(step)
        return self.drafts(self.train, self.rollouts[0], index, generator)

    def validation_batches(self) -> Iterator[DraftBatch]:
        """The runs held out, passes spread over them."""
        for part in torch.arange(len(self.rollouts[1])).split(8):
            generator = torch.Generator().manual_seed(0)
            yield self.drafts(self.val, self.rollouts[1], part, generator, self.guidance.branches)

    def drafts(
        self,
        captions: CaptionPrompts,
        rollouts: Sequence[Rollout],
        index: Tensor,
        generator: torch.Generator,
        branches: int = 1,
    ) -> DraftBatch:
        """Runs index [B], and `anchors` passes of each; branches: of the prompts, 1 where the target is not run."""
        prompts, start = captions(index, branches)
        chosen = [rollouts[i] for i in index.tolist()]
        codes = torch.stack([rollout.codes for rollout in chosen]).to(self.device, torch.int64)
        next_inputs = slot_inputs(self.target, prompts[: len(codes)], codes)[:, 1:]
        features, anchors, hints = [], [], []
        levels, most = self.hparams.levels, self.hparams.anchors
        for rollout in chosen:
            run_features, slots, run_hints = replay(rollout, levels)
            run_hints = run_hints[..., : next_inputs.shape[-1]]
            pick = torch.randint(len(slots), (most,), generator=generator)
            pick = torch.randperm(len(slots), generator=generator)[:most] if len(slots) >= most else pick
            at_slots = run_hints.new_zeros(len(run_features) - 1, run_hints.shape[-1])
            at_slots[slots] = run_hints[:, 0]
            features.append(run_features)
            anchors.append(slots[pick])
            hints.append(torch.cat((at_slots, run_hints[pick, 1:].flatten(0, 1))))
        stacked = (torch.stack(x).to(self.device) for x in (features, anchors, hints))
        run_features, slots, run_hints = stacked
        run_features = run_features if run_features.element_size() == 8 else run_features.float()
        found = run_hints.to(next_inputs.dtype)
        return DraftBatch(prompts, start, codes, next_inputs, run_features, slots, found)


def _split(rollouts: Sequence[Rollout]) -> Split:
    codes = torch.stack([rollout.codes for rollout in rollouts])[:, None]
    return Split(codes, tuple(rollout.text or "" for rollout in rollouts), ("",) * len(rollouts))


def train(
    data: Path | None,
    model: str | Path,
    settings: ParallelSettings,
    options: TrainingOptions,
    count: int,
    self_sampling: SelfSampling | None = None,
    follow: bool = False,
    batch: int = 16,
    layers: int = 1,
    method: str = "parallel",
) -> bool:
    """Train the parallel drafter in the folder of `options` further, on `count` runs of the target with it. False if interrupted.

    The captions of `data`, or the prompts of `self_sampling`, are drawn, under the rule of `method` and verified as it
    verifies chains. A drafter of fewer layers gets `layers` of them, and likewise levels and aux_layers (`grown`).
    Its state lies in a folder of its own below, beside the drafter that it began with, and the weights are
    replaced at the end. Once ended, it does not go on from there unless it is restarted.
    """
    folder, run_options = options.folder, replace(options, folder=options.folder / "rollouts")
    first = initial_drafter(folder, options.restart)
    found = load_target(model, folder, options.device, None if follow else settings.cfg, draws=True)
    prompts = choose_prompts(self_sampling or SelfSampling(), data, found.teacher.place, found.target)
    drafter = (
        ParallelDrafter.read(Source.open(first), found.target, found.teacher.drawing_dtype)
        .to(options.device)
        .eval()
        .requires_grad_(False)
    )
    origin = digest(checksum(tensor) for tensor in drafter.state_dict().values())
    larger = grown(drafter, layers, settings.levels, settings.aux_layers, found.target)
    config = larger.config
    levels = config.queries + 1
    held_out = min(max(MIN_HELD_OUT, count // HELD_OUT), MAX_HELD_OUT)
    picture_texts = [prompts.val[i % len(prompts.val)] for i in range(held_out)]
    picture_texts += [prompts.train[i % len(prompts.train)] for i in range(count)]
    settings = replace(
        settings, cfg=found.cfg, levels=levels, turn=config.turn, aux_layers=len(config.aux_layers)
    )
    chains = {"proposer": "parallel", "tree": f"chain-{levels}"}
    drawn = resolve(method, found.teacher.defaults(found.target), chains)
    run_with = RunOptions(levels, drawn, config.aux_layers, batch, settings.seed + 1)
    name = runs_key(found, origin, picture_texts, run_with)
    known = asdict(settings) | {
        "layers": config.decoder.layers,
        "target": found.origin,
        "data": name,
    }
    check_resumable(run_options, known)
    as_recorded = copy.deepcopy(larger).to(options.device, found.teacher.drawing_dtype).eval()
    as_recorded.requires_grad_(False)
    runs = recorded(found, as_recorded, name, picture_texts, run_with)
    target = found.teacher.unpacked(found.target)
    facts = {"codes": name, "runs": count, "drafter": origin, "prompts": len(prompts.train)}
    if data is not None:
        facts["folder"] = data.resolve().name
    known_runs = runs, held_out, facts, found.origin, options.device, found.sampling
    task = RolloutTask(settings, config.decoder.layers, target, *known_runs)
    task.model.load_state_dict(larger.state_dict())
    task.average.load_state_dict(larger.state_dict())
    if not run(task, run_options):
        return False
    exported, tensors = task.export()
    checkpoints.save(folder, exported, tensors, options.store)
    shutil.copyfile(run_options.folder / "provenance.json", folder / "provenance.json")
    return True


def initial_drafter(folder: Path, restart: bool) -> Path:
    """A copy of the drafter that a training on rollouts began with, made now where it begins.

    InputError where there is no drafter, or it is neither that one nor what the training left.
    """
    first = folder / "rollouts" / "begin"
    if (first / CONFIG).is_file() and not restart:
        mine = weights_checksum(first), weights_checksum(folder / "rollouts")
        if (folder / CONFIG).is_file() and weights_checksum(folder) not in mine:
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


def weights_checksum(folder: Path) -> str | None:
    """A hash of the weights in a folder; None where there are none."""
    if not (folder / WEIGHTS).is_file():
        return None
    return digest(
        checksum(tensor.float())
        for _, tensor in sorted(checkpoints.read_safetensors(folder / WEIGHTS).items())
    )


def grown(
    drafter: ParallelDrafter, layers: int, levels: int, aux_layers: int, target: Target
) -> ParallelDrafter:
    """A drafter in float32 of at least so many layers and levels: what is added changes nothing until it is trained.

    aux_layers: where the drafter reads no layers below the target's last, so many are added. InputError where it reads others.
    """
    config, shape = drafter.config, drafter.config.decoder
    if config.aux_layers and aux_layers not in (0, len(config.aux_layers)):
        raise InputError(
            f"--aux-layers {aux_layers}: the drafter reads {len(config.aux_layers)} layers already; leave it out."
        )
    larger = replace(
        config,
        decoder=replace(shape, layers=max(layers, shape.layers)),
        queries=max(levels - 1, config.queries),
        aux_layers=config.aux_layers or spread_aux_layers(aux_layers, target.decoder.config.layers),
        confidence=True,
    )
    made = ParallelDrafter(larger, target.decoder.rotary_table)
    for name, parameter in made.decoder.blocks[shape.layers :].named_parameters():
        if name.endswith(("wo.weight", "w2.weight")):
            nn.init.zeros_(parameter)
    tensors = {name: tensor.float() for name, tensor in drafter.state_dict().items()}
    added = larger.queries - config.queries
    tensors["queries"] = torch.cat((tensors["queries"], tensors["queries"][-1:].expand(added, -1)))
    inputs = tensors["fc.weight"]
    tensors["fc.weight"] = F.pad(inputs, (0, made.fc.in_features - inputs.shape[1]))
    made.load_state_dict(tensors, strict=False)
    return made
