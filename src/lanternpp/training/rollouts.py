"""Training of a parallel drafter on recorded runs of the target with it: drafts begin where they did, with the hints they had.

A drafter whose hints are the target's features at rejected codes can only learn to use them from recorded runs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Exact
from lanternpp.api.model import pack_target
from lanternpp.api.options import RuleDials, Settings, names
from lanternpp.api.settings import build_rule, build_verifier, resolve
from lanternpp.drafters.base import QueryDrafter
from lanternpp.drafters.parallel import ParallelDrafter
from lanternpp.engine.batching import drawing
from lanternpp.engine.decode import Engine, FinishedSample
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.observers import Observer
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.choose import Verifier
from lanternpp.engine.verify.joint import verify_joint
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.models.vq.neighbours import cache_folder, neighbours
from lanternpp.nn.checkpoints import CONFIG, checksum
from lanternpp.nn.sources import Source
from lanternpp.proposers.parallel import Parallel
from lanternpp.training.codes import Codes, Split, choose_prompts
from lanternpp.training.features import CaptionPrompts, drafter_inputs, slot_inputs, spread_aux_layers
from lanternpp.training.loop import run
from lanternpp.training.material import Done, Material, Shard, parts_of
from lanternpp.training.options import DrafterSettings, TrainingData, TrainingOptions
from lanternpp.training.parallel import DraftBatch, ParallelTask
from lanternpp.training.state import check_resumable
from lanternpp.training.teacher import Teacher
from lanternpp.trees.shapes import chain
from lanternpp.trees.static import StaticTree
from lanternpp.types import Admission, TargetOutput
from lanternpp.util.files import digest

PART = 32  # runs in a file
PARTS = ("codes", "kept", "features", "prompt")


@dataclass(frozen=True)
class Rollout:
    """One picture drawn over C passes, from chains of N - 1 drafts."""

    text: str | None
    codes: Tensor  # [length] int32
    kept: Tensor  # [C] int16 codes decided by each pass after the prefill
    features: Tensor  # [C, N, (1 + aux) D] guided, of every node of each pass, in the target's own dtype
    prompt: Tensor  # [T, (1 + aux) D] guided
    start: int  # the first slot of the conditional prompt


class Recorder(Observer):
    """Records the features of every pass, by slot of the batch."""

    def __init__(self, guidance: Guidance):
        self.guidance = guidance
        self.passes: dict[int, list[tuple[int, Tensor]]] = {}
        self.prompts: dict[int, tuple[Tensor, int]] = {}

    def admitted(self, new: Admission) -> None:
        """Keep the features of its prompt."""
        self.passes[new.slot] = []
        features = self.guidance.merge(new.features)[0].to(new.features.dtype)
        self.prompts[new.slot] = features, int(new.prompt.start[0])

    def verified(self, output: TargetOutput, count: Tensor) -> None:
        """Keep the features of a draft, and how many of its codes were accepted."""
        features = self.guidance.merge(output.features).to(output.features.dtype)
        for slot, kept in enumerate(output.verdict.kept.tolist()):
            if kept:
                self.passes[slot].append((kept, features[slot].clone()))

    def rollout(self, text: str | None, drawn: FinishedSample) -> Rollout:
        """The run of a finished sample."""
        kept, features = zip(*self.passes[drawn.slot], strict=True)
        passes = torch.tensor(kept, dtype=torch.int16), torch.stack(features)
        return Rollout(text, drawn.codes.to(torch.int32), *passes, *self.prompts[drawn.slot])


def record(
    target: Target,
    drafter: QueryDrafter,
    texts: Sequence[str | None],
    cfg: float,
    depth: int,
    batch: int = 16,
    seed: int = 0,
    sampling: Sampling | None = None,
    rule: Acceptance | None = None,
    verifier: Verifier = verify_joint,
) -> Iterator[Rollout]:
    """A rollout per text, as they finish; seeds run from `seed` on. rule None: the exact one."""
    proposer, guidance = Parallel(drafter, StaticTree(chain(depth))), Guidance(cfg)
    engine = Engine(
        target, proposer, rule or Exact(), sampling or Sampling(), guidance, batch, verifier=verifier
    )
    recorder = Recorder(guidance)
    engine.observers.append(recorder)
    for index, drawn in drawing(engine, texts, range(seed, seed + len(texts))):
        yield recorder.rollout(texts[index], drawn)


def replay(rollout: Rollout, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Guided features [S, (1 + aux) D] of all slots, the slots [C] after which drafts began, and their hints, as wide.

    Hints are [C, levels, (1 + aux) D].
    """
    depth = rollout.features.shape[1] - 1
    kept = rollout.kept.long()
    node = torch.arange(depth + 1)
    decided = rollout.features[node < kept[:, None]]  # [sum of kept, D], in order
    features = torch.cat((rollout.prompt, decided))
    anchors = len(rollout.prompt) - 1 + torch.cat((kept.new_zeros(1), kept.cumsum(0)[:-1]))
    place = kept[:-1, None] + torch.arange(levels)  # nodes after those that a pass decided
    exists = place <= depth
    index = place.clamp(max=depth)[..., None].expand(-1, -1, features.shape[-1])
    found = rollout.features[:-1].gather(1, index)
    hints = torch.cat((found.new_zeros(1, *found.shape[1:]), found * exists[..., None]))
    return features, anchors, hints


@dataclass(frozen=True)
class Runs:
    """Runs of a target with a drafter of weights `origin`, one of each text, kept in shards beside the codes.

    Chains have the drafter's levels, and are verified as `settings` say.
    """

    teacher: Teacher
    origin: str
    drafter: ParallelDrafter
    texts: Sequence[str]
    settings: Settings
    seed: int

    @property
    def key(self) -> str:
        """A hash of all that decides the runs."""
        config, drawn = self.drafter.config, asdict(self.settings)
        dials = sorted(
            (name, drawn[name]) for name in ("verify", *names(RuleDials)) if drawn.get(name) is not None
        )
        how = f"{self.teacher.cfg} {config.queries} {config.aux_layers} {self.seed} {self.settings.accept} {dials}"
        return digest([self.teacher.origin, self.origin, *self.texts, how])

    def build(self) -> list[Rollout]:
        """The runs; missing ones are recorded now."""
        target, config = self.teacher.target, self.drafter.config
        width = target.decoder.config.dim * (1 + len(config.aux_layers))
        # Assumes that a pass decides three codes on average.
        room = target.length * width * next(target.parameters()).element_size() * (config.queries + 2) // 3
        folder, parts = self.teacher.store / f"runs-{self.key}", parts_of(len(self.texts), PART)
        material = Material(folder, parts, self._record, "runs", "recorded runs of the target", room, "runs")
        return [
            Rollout(text, **{name: tensors[f"{i} {name}"] for name in PARTS}, start=start)
            for tensors, facts in material.build().read()
            for i, (text, start) in enumerate(zip(facts["texts"], facts["starts"], strict=True))
        ]

    def _record(self, parts: Sequence[range], done: Done) -> Iterator[Shard]:
        teacher, target = self.teacher, self.teacher.target
        rule, verifier = build_rule(self.settings, self._table), build_verifier(self.settings)
        pack_target(target)
        self.drafter.pack(target)
        for part in parts:
            texts, found = self.texts[part.start : part.stop], list[Rollout]()
            depth, seed = self.drafter.config.queries + 1, (self.seed << 32) + part.start
            for rollout in record(
                target, self.drafter, texts, teacher.cfg, depth, 16, seed, teacher.sampling, rule, verifier
            ):
                found.append(rollout)
                done(len(found))
            tensors = {f"{i} {name}": getattr(x, name) for i, x in enumerate(found) for name in PARTS}
            yield tensors, {"texts": [x.text for x in found], "starts": [x.start for x in found]}

    def _table(self, k: int) -> Tensor:
        codebook = self.teacher.target.codebook
        if codebook is None:
            rule = self.settings.accept
            raise InputError(f"the rule {rule} needs neighbours, and the target has no codebook.")
        kept = neighbours(codebook.cpu(), min(k, len(codebook) - 1), cache_folder(self.teacher.place))
        return kept.to(codebook.device)


class RolloutTask(ParallelTask):
    """A parallel drafter that goes on from the weights of `begin`, on runs of which the last `held_out` validate."""

    def __init__(
        self,
        settings: DrafterSettings,
        teacher: Teacher,
        rollouts: Sequence[Rollout],
        held_out: int,
        data: dict[str, Any],
        begin: ParallelDrafter,
    ):
        self.rollouts, self.begin = (rollouts[:-held_out], rollouts[-held_out:]), begin
        train, val = map(_split, self.rollouts)
        super().__init__(settings, teacher, Codes(train, val, data))

    def make(self) -> ParallelDrafter:
        """A copy of the drafter that it begins with."""
        return copy.deepcopy(self.begin)

    def training_batch(self, index: Tensor, variant: Tensor, generator: torch.Generator) -> DraftBatch:
        """Some runs, and some of their passes."""
        return self.drafts(self.train, self.rollouts[0], index, generator)

    def validation_batches(self) -> Iterator[DraftBatch]:
        """The runs held out, passes spread over them."""
        for part in torch.arange(len(self.rollouts[1])).split(8):
            generator = torch.Generator().manual_seed(0)
            yield self.drafts(self.val, self.rollouts[1], part, generator, exact=True)

    def drafts(
        self,
        captions: CaptionPrompts,
        rollouts: Sequence[Rollout],
        index: Tensor,
        generator: torch.Generator,
        exact: bool = False,
    ) -> DraftBatch:
        """Runs index [B], and `anchors` passes of each; exact: to be measured, for which the target is run."""
        prompts, start = captions(index, self.guidance.branches if exact else 1)
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
        run_features, slots, run_hints = (torch.stack(x).to(self.device) for x in (features, anchors, hints))
        run_features = run_features if run_features.element_size() == 8 else run_features.float()
        found = run_hints.to(next_inputs.dtype)
        rows = None
        if exact:
            with torch.no_grad():
                rows = drafter_inputs(self.target, prompts, self.guidance.rows(codes), start)[1]
        return DraftBatch(prompts, start, codes, next_inputs, run_features, slots, found, rows)


def _split(rollouts: Sequence[Rollout]) -> Split:
    codes = torch.stack([rollout.codes for rollout in rollouts])[:, None]
    return Split(codes, tuple(rollout.text or "" for rollout in rollouts))


def train(
    model: str | Path,
    begin: Path,
    settings: DrafterSettings,
    source: TrainingData,
    options: TrainingOptions,
    count: int,
    method: str = "parallel",
) -> bool:
    """Train the parallel drafter in the folder `begin` further, on `count` runs of the target with it. False if interrupted.

    The prompts, or the captions of the pictures, are drawn under the rule of `method` and verified as it verifies chains.
    A drafter of fewer layers, levels or auxiliary layers than the settings have grows to as many. InputError.
    """
    source.check()
    options.check()
    if not (begin / CONFIG).is_file():
        raise InputError(
            f"{begin} holds no parallel drafter to go on with: train one first, without --rollouts."
        )
    if begin.resolve() == options.folder.resolve():
        raise InputError(f"{begin} holds the drafter that it begins with: name another folder with -o DIR.")
    teacher = Teacher(model, options, settings.cfg, draws=True)
    target = teacher.target
    prompts = choose_prompts(teacher, source.prompts, source.data)
    drafter = ParallelDrafter.read(Source.open(begin), target, teacher.drawing_dtype)
    origin = digest(checksum(tensor) for tensor in drafter.state_dict().values())
    larger = grown(drafter, settings, target)
    config = larger.config
    settings = replace(
        settings,
        cfg=teacher.cfg,
        layers=config.decoder.layers,
        levels=config.queries + 1,
        aux_layers=len(config.aux_layers),
        turn=config.turn,
    )
    texts, held_out = prompts.pictures(count)
    chains = {"proposer": "parallel", "tree": f"chain-{settings.levels}"}
    as_recorded = copy.deepcopy(larger).to(teacher.device, teacher.drawing_dtype).eval().requires_grad_(False)
    drawn = resolve(method, teacher.defaults, chains)
    runs = Runs(teacher, origin, as_recorded, texts, drawn, settings.seed + 1)
    check_resumable(options, {**asdict(settings), "target": teacher.origin, "data": runs.key})
    facts = {"codes": runs.key, "runs": count, "drafter": origin, "prompts": len(prompts.train)}
    if source.data is not None:
        facts["folder"] = source.data.resolve().name
    return run(RolloutTask(settings, teacher, runs.build(), held_out, facts, larger), options)


def grown(drafter: ParallelDrafter, settings: DrafterSettings, target: Target) -> ParallelDrafter:
    """A drafter in float32 of at least so many layers and levels: what is added changes nothing until it is trained.

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
    tensors = {name: tensor.float() for name, tensor in drafter.state_dict().items()}
    added = larger.queries - config.queries
    tensors["queries"] = torch.cat((tensors["queries"], tensors["queries"][-1:].expand(added, -1)))
    inputs = tensors["fc.weight"]
    tensors["fc.weight"] = F.pad(inputs, (0, made.fc.in_features - inputs.shape[1]))
    made.load_state_dict(tensors, strict=False)
    return made
