"""Training of a parallel drafter on recorded runs of the target with it: drafts begin where they began in the run, with the same hints.

A drafter whose hints are the target's features at rejected codes can only learn to use them from recorded runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.api.options import RuleDials, names
from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
from lanternpp.engine.batching import draw_samples
from lanternpp.engine.decode import Engine, Observer
from lanternpp.engine.sampling import Guidance
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn.sources import Source
from lanternpp.training.codes import MAX_HELD_OUT, Codes, Split, build_shards, read_file
from lanternpp.training.drafter import CaptionPrompts, drafter_inputs, slot_inputs
from lanternpp.training.options import DrafterSettings, TrainingData, flag
from lanternpp.training.parallel import DraftBatch, ParallelTask, spread_aux_layers
from lanternpp.training.teacher import DRAWN_SHARD_SIZE, OwnCodes, Teacher, choose_prompts, key_of, warping
from lanternpp.types import Admission, TargetOutput
from lanternpp.util.devices import free_memory
from lanternpp.util.files import digest


@dataclass(frozen=True)
class Rollout:
    """One picture drawn in C passes, each with a chain of N - 1 draft codes."""

    codes: Tensor  # [length] int32
    kept: Tensor  # [C] int16 number of codes decided by each pass after the prefill
    features: Tensor  # [C, N, (1 + aux) D] guided, of every node of each pass, in the target's own dtype
    prompt: Tensor  # [T, (1 + aux) D] guided features of the prompt


class Recorder(Observer):
    """Records the guided features of every pass, by slot of the batch."""

    def __init__(self, guidance: Guidance):
        self.guidance = guidance
        # (number of decided codes, features) of each pass; the prefill comes first, with 0 codes.
        self.passes: dict[int, list[tuple[int, Tensor]]] = {}

    def admitted(self, new: Admission) -> None:
        """Record the features of the new picture's prompt."""
        self.passes[new.slot] = [(0, self._guided(new.features)[0])]

    def verified(self, output: TargetOutput, count: Tensor) -> None:
        """Record the features of each draft, and the number of codes that its pass decided."""
        features = self._guided(output.features)
        for slot, kept in enumerate(output.verdict.kept.tolist()):
            if kept:
                self.passes[slot].append((kept, features[slot].clone()))

    def _guided(self, features: Tensor) -> Tensor:
        return self.guidance.merge(features).to(features.dtype)


def record(
    engine: Engine,
    texts: Sequence[str | None],
    seeds: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[int, Rollout]]:
    """Draw as `draw_samples`, by an engine that drafts chains with a parallel drafter; yield rollouts in the place of samples."""
    recorder = Recorder(engine.guidance)
    engine.observers = [recorder]
    for index, sample in draw_samples(engine, texts, seeds, progress):
        (_, prompt), *passes = recorder.passes[sample.slot]
        counts, features = zip(*passes, strict=True)
        kept = torch.tensor(counts, dtype=torch.int16)
        yield index, Rollout(sample.codes.to(torch.int32), kept, torch.stack(features), prompt)


def replay(kept: Tensor, depth: int, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nodes of a run that a training reads, numbered over all C passes of chains of `depth` draft codes.

    kept [C]: codes that each pass decided. Returns the nodes of decided codes [sum of kept], the number of codes decided before
    each pass [C], and the nodes whose features are the hints of each pass [C, levels]: -1 for no hint, as in the first pass.
    """
    kept, width = kept.long(), depth + 1
    node, first_node = torch.arange(width), torch.arange(len(kept))[:, None] * width  # [N] and [C, 1]
    decided = (first_node + node)[node < kept[:, None]]
    rejected = kept[:-1, None] + torch.arange(levels)  # [C - 1, levels] nodes after decided ones
    hints = torch.where(rejected <= depth, first_node[:-1] + rejected, -1)
    return decided, F.pad(kept.cumsum(0)[:-1], (1, 0)), F.pad(hints, (0, 0, 1, 0), value=-1)


class Runs(OwnCodes):
    """Runs of a target with the drafter of `source`, in shards beside the codes.

    The source's method draws them, with its rule and its verifier, and chains of the drafter's levels. A drafter of fewer layers,
    levels or auxiliary layers than the settings grows to as many; InputError as `grown`.
    """

    draw = staticmethod(record)

    def __init__(self, settings: DrafterSettings, teacher: Teacher, source: TrainingData):
        assert source.drafter is not None
        prompts = choose_prompts(teacher, source.prompts, source.data)
        super().__init__(teacher, prompts, source.rollouts, source.sample_batch, settings.seed + 1)
        drafter = ParallelDrafter.read(Source.open(source.drafter), teacher.target, teacher.drawing_dtype)
        origin = key_of(drafter)
        torch.manual_seed(settings.seed)  # of the weights of added blocks
        self.drafter = grown(drafter, settings, teacher.target)
        config = self.drafter.config
        self.settings = replace(settings, **shape_of(config))
        chains: dict[str, Any] = {"proposer": "parallel", "tree": f"chain-{self.settings.levels}"}
        chains |= {"min_survival": 0.0, "cfg": teacher.cfg, "batch_size": self.batch}
        self.draw_settings = teacher.pipeline().settings(source.method, **chains)
        dials = {name: getattr(self.draw_settings, name) for name in ("verify", *names(RuleDials))}
        dials |= warping(self.draw_settings) or {}
        items = sorted((name, value) for name, value in dials.items() if value is not None)
        drafting = f"{teacher.cfg} {config.queries} {config.aux_layers} {self.seed} {self.draw_settings.accept} {items}"
        self.key = digest([teacher.origin, origin, *self.texts, drafting])
        captions = {} if source.data is None else {"folder": source.data.resolve().name}
        self.facts = {"runs": source.rollouts, "drafter": origin, **captions, "prompts": self.num_prompts}

    def build(self) -> Codes:
        """Return the runs in the folder of the teacher's store, where missing ones are recorded now."""
        folder, contents = self.teacher.store / f"runs-{self.key}", "recorded runs of the target"
        paths = build_shards(folder, len(self.texts), DRAWN_SHARD_SIZE, self._draw, contents)
        # Every step reads features of runs, so they stay on a GPU where they take at most half of its free memory.
        device, size = self.teacher.device, sum(path.stat().st_size for path in paths)
        on_gpu = device.type == "cuda" and 2 * size < (free_memory(device) or 0)
        runs = list[Rollout]()
        for path in paths:
            tensors, facts = read_file(path, "texts", "0 codes")
            for i in range(len(facts["texts"])):
                run = Rollout(*(tensors[f"{i} {item.name}"] for item in fields(Rollout)))
                if on_gpu:
                    run = replace(run, features=run.features.to(device), prompt=run.prompt.to(device))
                runs.append(run)
        codes = torch.stack([run.codes for run in runs])[:, None]
        parts = slice(-self.num_held_out), slice(-self.num_held_out, None)
        train, val = (Split(codes[x], tuple(self.texts[x]), runs=tuple(runs[x])) for x in parts)
        return Codes(train, val, self.key, self.facts, self.drafter)

    def engine(self) -> Engine:
        """Return the engine that draws, with the packed drafter."""
        teacher = self.teacher
        drafter = copy.deepcopy(self.drafter).to(teacher.device, teacher.drawing_dtype)
        drafter.eval().requires_grad_(False).pack(teacher.target)
        return teacher.pipeline(parallel=drafter).new_engine(self.draw_settings)

    def shard(self, samples: Sequence[Rollout]) -> dict[str, Tensor]:
        """Return the tensors that a file stores of runs."""
        return {f"{i} {name}": tensor for i, run in enumerate(samples) for name, tensor in vars(run).items()}


class RolloutTask(ParallelTask):
    """A parallel drafter that goes on from the weights of another, on recorded runs of the target with it."""

    check_pictures = MAX_HELD_OUT

    @classmethod
    def material(cls, settings: DrafterSettings, teacher: Teacher, source: TrainingData) -> tuple[Any, Any]:
        """Return the settings, completed by the shape of the initial drafter, and the runs."""
        runs = Runs(settings, teacher, source)
        return runs.settings, runs

    def make(self) -> ParallelDrafter:
        """Return a copy of the initial drafter."""
        return copy.deepcopy(self.codes.initial_drafter)

    def batch(
        self,
        captions: CaptionPrompts,
        index: Tensor,
        variant: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> DraftBatch:
        """Return the inputs of runs index [B], with `anchors` passes of each; without a generator those of a validation."""
        validates = generator is None
        generator = generator or torch.Generator().manual_seed(0)
        prompts, start = captions(index, self.guidance.branches if validates else 1)
        codes = captions.split.pick(index).to(self.device)
        next_inputs = slot_inputs(self.target, prompts[: len(codes)], codes)[:, 1:]
        dim, num_anchors, rows = next_inputs.shape[-1], self.hparams.anchors, []
        for i in index.tolist():
            run = captions.split.runs[i]
            decided, counts, hint_nodes = replay(run.kept, run.features.shape[1] - 1, self.hparams.levels)
            # A recorded prompt is as long as it was drawn; `captions` pads all prompts to one length.
            prompt = F.pad(run.prompt, (0, 0, captions.slots - len(run.prompt), 0))
            slots = len(prompt) - 1 + counts  # [C] after which the passes drafted
            # Passes repeat where a run has fewer than `anchors`.
            picked = torch.randint(len(slots), (num_anchors,), generator=generator)
            if len(slots) >= num_anchors:
                picked = torch.randperm(len(slots), generator=generator)[:num_anchors]
            # The first hint of every pass belongs to its slot, the other hints of picked passes to their queries.
            slot_nodes = torch.full((len(prompt) + len(decided) - 1,), -1)
            slot_nodes[slots] = hint_nodes[:, 0]
            nodes = torch.cat((slot_nodes, hint_nodes[picked, 1:].flatten())).to(run.features.device)
            node_features = run.features.flatten(0, 1)  # [C N, (1 + aux) D]
            hints = node_features[nodes, :dim] * (nodes >= 0)[:, None]
            features = torch.cat((prompt, node_features[decided.to(node_features.device)]))
            rows.append((features, slots[picked], hints))
        features, anchors, hints = (torch.stack(x).to(self.device) for x in zip(*rows, strict=True))
        features = features if features.element_size() == 8 else features.float()
        hints, unguided = hints.to(next_inputs.dtype), None
        if validates:
            with torch.no_grad():
                unguided = drafter_inputs(self.target, prompts, self.guidance.rows(codes), start)[1]
        return DraftBatch(prompts, start, codes, next_inputs, features, anchors, hints, unguided)


def shape_of(config: ParallelConfig) -> dict[str, Any]:
    """Return the settings that a drafter of this shape is trained with."""
    shape = {"layers": config.decoder.layers, "levels": config.queries + 1, "condition_width": config.turn}
    return {**shape, "aux_layers": len(config.aux_layers)}


def grown(drafter: ParallelDrafter, settings: DrafterSettings, target: Target) -> ParallelDrafter:
    """Return the drafter in float32, with at least the settings' layers and levels; added ones change nothing until they are trained.

    A drafter without auxiliary layers gets the settings'. Raise InputError where settings ask for a shape that cannot be had.
    """
    config, shape = drafter.config, drafter.config.decoder
    larger_config = replace(
        config,
        decoder=replace(shape, layers=max(settings.layers, shape.layers)),
        queries=max(settings.levels - 1, config.queries),
        aux_layers=config.aux_layers or spread_aux_layers(settings.aux_layers, target.decoder.config.layers),
        confidence=True,
    )
    for name, number in shape_of(larger_config).items():
        if (given := getattr(settings, name)) not in (number, getattr(DrafterSettings, name)):
            raise InputError(f"{flag(name)} {given}: the drafter has {number} already; leave it out.")
    larger = ParallelDrafter(larger_config, target.decoder.rotary_table).float()
    for name, parameter in larger.decoder.blocks[shape.layers :].named_parameters():
        if name.endswith(("wo.weight", "w2.weight")):
            nn.init.zeros_(parameter)
    nn.init.zeros_(larger.get_parameter("confidence.weight"))
    tensors = {name: tensor.float() for name, tensor in drafter.state_dict().items()}
    num_added = larger_config.queries - config.queries
    tensors["queries"] = torch.cat((tensors["queries"], tensors["queries"][-1:].expand(num_added, -1)))
    tensors["fc.weight"] = F.pad(tensors["fc.weight"], (0, larger.fc.in_features - drafter.fc.in_features))
    larger.load_state_dict(tensors, strict=False)
    return larger
