"""Training of a parallel drafter on recorded runs of the target with it: drafts begin where they did, with the hints they had.

A drafter whose hints are the target's features at rejected codes can only learn to use them from recorded runs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.api.options import RuleDials, names
from lanternpp.drafters.parallel import ParallelDrafter
from lanternpp.engine.batching import drawing
from lanternpp.engine.decode import Engine, Observer
from lanternpp.engine.sampling import Guidance
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn.sources import Source
from lanternpp.training.codes import DRAWN, MAX_HELD_OUT, Codes, OwnCodes, Split, choose_prompts
from lanternpp.training.features import CaptionPrompts, drafter_inputs, slot_inputs, spread_aux_layers
from lanternpp.training.material import Done, Shard, build_shards, read_file
from lanternpp.training.options import DrafterSettings, TrainingData
from lanternpp.training.parallel import DraftBatch, ParallelTask
from lanternpp.training.teacher import Teacher, key_of, warping
from lanternpp.types import Admission, TargetOutput
from lanternpp.util.devices import free_memory
from lanternpp.util.files import digest

PARTS = ("codes", "kept", "features", "prompt")


@dataclass(frozen=True)
class Rollout:
    """One picture drawn over C passes, from chains of N - 1 drafts."""

    text: str | None
    codes: Tensor  # [length] int32
    kept: Tensor  # [C] int16 codes decided by each pass after the prefill
    features: Tensor  # [C, N, (1 + aux) D] guided, of every node of each pass, in the target's own dtype
    prompt: Tensor  # [T, (1 + aux) D] guided


class Recorder(Observer):
    """Records the guided features of every pass, by slot of the batch."""

    def __init__(self, guidance: Guidance):
        self.guidance = guidance
        self.passes: dict[
            int, list[tuple[int, Tensor]]
        ] = {}  # codes accepted, features; the prompt's come first

    def admitted(self, new: Admission) -> None:
        """Keep the features of its prompt."""
        self.passes[new.slot] = [(0, self._guided(new.features)[0])]

    def verified(self, output: TargetOutput, count: Tensor) -> None:
        """Keep the features of a draft, and how many of its codes were accepted."""
        features = self._guided(output.features)
        for slot, kept in enumerate(output.verdict.kept.tolist()):
            if kept:
                self.passes[slot].append((kept, features[slot].clone()))

    def _guided(self, features: Tensor) -> Tensor:
        return self.guidance.merge(features).to(features.dtype)


def record(
    engine: Engine, texts: Sequence[str | None], seeds: Sequence[int], done: Done = lambda pictures: None
) -> list[Rollout]:
    """A rollout per text and seed, in order, of an engine that drafts chains by a parallel drafter."""
    recorder, found = Recorder(engine.guidance), dict[int, Rollout]()
    engine.observers = [recorder]
    for index, drawn in drawing(engine, texts, seeds):
        (_, prompt), *passes = recorder.passes[drawn.slot]
        kept, features = zip(*passes, strict=True)
        decided = torch.tensor(kept, dtype=torch.int16)
        codes = drawn.codes.to(torch.int32)
        found[index] = Rollout(texts[index], codes, decided, torch.stack(features), prompt)
        done(len(found))
    return [found[index] for index in range(len(texts))]


def replay(kept: Tensor, depth: int, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes of a run that a training reads, counted over all C passes of chains of `depth` drafts that decided kept [C] codes.

    Returns those of decided codes [sum of kept]; how many of these are decided where each pass begins [C]; and those whose features
    are the hints of each pass, [C, levels]: -1 where there are none, as in the first pass.
    """
    kept, width = kept.long(), depth + 1
    node, first = torch.arange(width), torch.arange(len(kept))[:, None] * width
    decided = (first + node)[node < kept[:, None]]
    place = kept[:-1, None] + torch.arange(levels)  # nodes after those that a pass decided
    hints = torch.where(place <= depth, first[:-1] + place, -1)
    return decided, F.pad(kept.cumsum(0)[:-1], (1, 0)), F.pad(hints, (0, 0, 1, 0), value=-1)


def split_of(runs: Sequence[Rollout]) -> Split:
    """Recorded runs as a split."""
    codes = torch.stack([run.codes for run in runs])[:, None]
    return Split(codes, tuple(run.text or "" for run in runs), runs=tuple(runs))


class Runs(OwnCodes):
    """Runs of a target with the drafter of `source`, kept in shards beside the codes.

    They are drawn by a method, under its rule and verified as it verifies chains, with chains of the drafter's levels. A
    drafter of fewer layers, levels or auxiliary layers than the settings say grows to as many. InputError.
    """

    def __init__(self, settings: DrafterSettings, teacher: Teacher, source: TrainingData):
        assert source.drafter is not None
        prompts = choose_prompts(teacher, source.prompts, source.data)
        super().__init__(teacher, prompts, source.rollouts, source.sample_batch, settings.seed + 1)
        drafter = ParallelDrafter.read(Source.open(source.drafter), teacher.target, teacher.drawing_dtype)
        origin = key_of(drafter)
        self.begin = grown(drafter, settings, teacher.target)
        config = self.begin.config
        self.settings = replace(
            settings,
            layers=config.decoder.layers,
            levels=config.queries + 1,
            aux_layers=len(config.aux_layers),
            condition_width=config.turn,
        )
        chains: dict[str, Any] = {"proposer": "parallel", "tree": f"chain-{self.settings.levels}"}
        chains |= {"min_survival": 0.0, "cfg": teacher.cfg, "batch_size": self.batch}
        self.drawn = teacher.pipeline().settings(source.method, **chains)
        drawn = {name: getattr(self.drawn, name) for name in ("verify", *names(RuleDials))}
        drawn |= warping(self.drawn) or {}
        dials = sorted((name, value) for name, value in drawn.items() if value is not None)
        how = f"{teacher.cfg} {config.queries} {config.aux_layers} {self.seed} {self.drawn.accept} {dials}"
        self.key = digest([teacher.origin, origin, *self.texts, how])
        place = {} if source.data is None else {"folder": source.data.resolve().name}
        self.facts = {"codes": self.key, "runs": source.rollouts, "drafter": origin, **place}

    def build(self) -> Codes:
        """The runs; missing ones are recorded now."""
        target, config = self.teacher.target, self.begin.config
        width = target.decoder.config.dim * (1 + len(config.aux_layers))
        # Assumes that a pass decides three codes on average.
        room = target.length * width * next(target.parameters()).element_size() * (config.queries + 2) // 3
        folder, contents = self.teacher.store / f"runs-{self.key}", "recorded runs of the target"
        paths = build_shards(folder, len(self.texts), DRAWN, self._draw, contents, room)
        # Every step reads features of runs, which a GPU keeps where they take at most half of its free memory.
        device, size = self.teacher.device, sum(path.stat().st_size for path in paths)
        fits = device.type == "cuda" and 2 * size < (free_memory(device) or 0)
        place = dict.fromkeys(("features", "prompt") if fits else (), device)
        runs = [
            Rollout(text, **{name: tensors[f"{i} {name}"].to(place.get(name, "cpu")) for name in PARTS})
            for tensors, facts in (read_file(path, "texts", "0 codes") for path in paths)
            for i, text in enumerate(facts["texts"])
        ]
        facts = self.facts | {"prompts": self.prompts}
        train, val = (split_of(part) for part in (runs[: -self.held_out], runs[-self.held_out :]))
        return Codes(train, val, facts, self.begin)

    def engine(self) -> Engine:
        """The engine that draws, with the packed drafter."""
        teacher = self.teacher
        drafter = copy.deepcopy(self.begin).to(teacher.device, teacher.drawing_dtype)
        drafter.eval().requires_grad_(False).pack(teacher.target)
        return teacher.pipeline(parallel=drafter).new_engine(self.drawn)

    def draw(self, engine: Engine, texts: Sequence[str], seeds: Sequence[int], done: Done) -> list[Any]:
        """The runs of some texts, in order."""
        return record(engine, texts, seeds, done)

    def shard(self, drawn: Sequence[Any], texts: Sequence[str]) -> Shard:
        """Recorded runs, of these texts, as a file keeps them."""
        tensors = {f"{i} {name}": getattr(run, name) for i, run in enumerate(drawn) for name in PARTS}
        return tensors, {"texts": texts}


class RolloutTask(ParallelTask):
    """A parallel drafter that goes on from the weights of another, on recorded runs of the target with it."""

    check_pictures = MAX_HELD_OUT
    found = ("cfg", "layers", "levels", "aux_layers", "condition_width")

    @classmethod
    def material(cls, settings: DrafterSettings, teacher: Teacher, source: TrainingData) -> tuple[Any, Any]:
        """The settings, with those of the drafter that it begins with, and the runs."""
        runs = Runs(settings, teacher, source)
        return runs.settings, runs

    def make(self) -> ParallelDrafter:
        """A copy of the drafter that it begins with."""
        return copy.deepcopy(self.codes.begin)

    def batch(
        self,
        captions: CaptionPrompts,
        index: Tensor,
        variant: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> DraftBatch:
        """Runs index [B], and `anchors` passes of each."""
        exact, generator = generator is None, generator or torch.Generator().manual_seed(0)
        prompts, start = captions(index, self.guidance.branches if exact else 1)
        codes = captions.split.pick(index).to(self.device)
        next_inputs = slot_inputs(self.target, prompts[: len(codes)], codes)[:, 1:]
        width, most, found = next_inputs.shape[-1], self.hparams.anchors, []
        for run in (captions.split.runs[i] for i in index.tolist()):
            decided, begin, nodes = replay(run.kept, run.features.shape[1] - 1, self.hparams.levels)
            # recorded prompts are padded by themselves, those of `captions` to one length
            run = replace(run, prompt=F.pad(run.prompt, (0, 0, captions.slots - len(run.prompt), 0)))
            slots = len(run.prompt) - 1 + begin
            pick = torch.randint(len(slots), (most,), generator=generator)
            pick = torch.randperm(len(slots), generator=generator)[:most] if len(slots) >= most else pick
            at_slots = torch.full((len(run.prompt) + len(decided) - 1,), -1)
            at_slots[slots] = nodes[:, 0]
            nodes = torch.cat((at_slots, nodes[pick, 1:].flatten())).to(run.features.device)
            features = run.features.flatten(0, 1)
            hints = features[nodes, :width] * (nodes >= 0)[:, None]
            features = torch.cat((run.prompt, features[decided.to(features.device)]))
            found.append((features, slots[pick], hints))
        features, anchors, hints = (torch.stack(x).to(self.device) for x in zip(*found, strict=True))
        features = features if features.element_size() == 8 else features.float()
        rows = None
        if exact:
            with torch.no_grad():
                rows = drafter_inputs(self.target, prompts, self.guidance.rows(codes), start)[1]
        hints = hints.to(next_inputs.dtype)
        return DraftBatch(prompts, start, codes, next_inputs, features, anchors, hints, rows)


def grown(drafter: ParallelDrafter, settings: DrafterSettings, target: Target) -> ParallelDrafter:
    """A drafter in float32 of at least so many layers and levels: the new ones change nothing until they are trained.

    Where the drafter reads no layers below the target's last, as many as the settings say are added. InputError where it
    reads others.
    """
    config, shape, aux = drafter.config, drafter.config.decoder, settings.aux_layers
    if config.aux_layers and aux not in (0, len(config.aux_layers)):
        known = len(config.aux_layers)
        raise InputError(f"--aux-layers {aux}: the drafter reads {known} layers already; leave it out.")
    larger = replace(
        config,
        decoder=replace(shape, layers=max(settings.layers, shape.layers)),
        queries=max(settings.levels - 1, config.queries),
        aux_layers=config.aux_layers or spread_aux_layers(aux, target.decoder.config.layers),
        confidence=True,
    )
    made = ParallelDrafter(larger, target.decoder.rotary_table).float()
    for name, parameter in made.decoder.blocks[shape.layers :].named_parameters():
        if name.endswith(("wo.weight", "w2.weight")):
            nn.init.zeros_(parameter)
    nn.init.zeros_(made.get_parameter("confidence.weight"))
    tensors = {name: tensor.float() for name, tensor in drafter.state_dict().items()}
    added = larger.queries - config.queries
    tensors["queries"] = torch.cat((tensors["queries"], tensors["queries"][-1:].expand(added, -1)))
    inputs = tensors["fc.weight"]
    tensors["fc.weight"] = F.pad(inputs, (0, made.fc.in_features - inputs.shape[1]))
    made.load_state_dict(tensors, strict=False)
    return made
