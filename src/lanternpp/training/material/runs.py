"""Recorded runs of a target with a parallel drafter: the target's features of every drafted code, kept or refused.

A drafter whose hints are the target's features at refused codes can only learn to use them from recorded runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Exact
from lanternpp.api.model import pack_target
from lanternpp.api.options import RuleDials, Settings, names
from lanternpp.api.settings import build_rule, build_verifier
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
from lanternpp.proposers.parallel import Parallel
from lanternpp.training.material.gather import LoadedTarget
from lanternpp.training.material.shards import Shards, parts_of
from lanternpp.trees.shapes import chain
from lanternpp.trees.static import StaticTree
from lanternpp.types import Admission, TargetOutput
from lanternpp.util.files import digest

PART = 32  # runs in a file
PartDials = ("codes", "kept", "features", "prompt")


@dataclass(frozen=True)
class Rollout:
    """One picture drawn over C passes, from chains of N - 1 guesses."""

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
        """The features of its prompt."""
        self.passes[new.slot] = []
        features = self.guidance.merge(new.features)[0].to(new.features.dtype)
        self.prompts[new.slot] = features, int(new.prompt.start[0])

    def verified(self, output: TargetOutput, count: Tensor) -> None:
        """The features of a whole draft, and how many of its codes were kept."""
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
    """Guided features [S, (1 + aux) D] of all slots, the slots [C] drafts began behind, and their hints, as wide.

    Hints are [C, levels, (1 + aux) D].
    """
    depth = rollout.features.shape[1] - 1
    kept = rollout.kept.long()
    node = torch.arange(depth + 1)
    decided = rollout.features[node < kept[:, None]]  # [sum of kept, D], in order
    features = torch.cat((rollout.prompt, decided))
    anchors = len(rollout.prompt) - 1 + torch.cat((kept.new_zeros(1), kept.cumsum(0)[:-1]))
    place = kept[:-1, None] + torch.arange(levels)  # nodes behind those a pass decided
    exists = place <= depth
    found = rollout.features[:-1].gather(
        1, place.clamp(max=depth)[..., None].expand(-1, -1, features.shape[-1])
    )
    hints = torch.cat((found.new_zeros(1, *found.shape[1:]), found * exists[..., None]))
    return features, anchors, hints


@dataclass(frozen=True)
class RunOptions:
    """How runs are drawn: chains of `depth` guesses, verified as the settings say; layers of the target that are kept."""

    depth: int
    settings: Settings
    aux_layers: tuple[int, ...] = ()
    batch: int = 16
    seed: int = 0

    @property
    def key(self) -> str:
        """What decides the runs, besides the model and the texts."""
        drawn = asdict(self.settings)
        parts = {name: drawn[name] for name in ("verify", *names(RuleDials)) if drawn.get(name) is not None}
        return f"{self.depth} {self.batch} {self.seed} {list(self.aux_layers)} {self.settings.accept} {sorted(parts.items())}"


def runs_key(found: LoadedTarget, origin: str, texts: Sequence[str], options: RunOptions) -> str:
    """The name of runs of the texts with a drafter of weights `origin`."""
    return digest([found.origin, origin, *texts, f"{found.cfg} {options.key}"])


def recorded(
    found: LoadedTarget,
    drafter: ParallelDrafter,
    name: str,
    texts: Sequence[str],
    options: RunOptions,
) -> list[Rollout]:
    """Runs of the texts with a drafter, `name`d as `runs_key` does, kept in shards beside the codes.

    What is missing is recorded now.
    """
    target, codebook, settings = found.target, found.target.codebook, options.settings

    def table(k: int) -> Tensor:
        if codebook is None:
            raise InputError(f"the rule {settings.accept} needs neighbours, and the target has no codebook.")
        kept = neighbours(codebook.cpu(), min(k, len(codebook) - 1), cache_folder(found.teacher.place))
        return kept.to(codebook.device)

    rule, verifier = build_rule(settings, table), build_verifier(settings)

    def compute() -> None:
        pack_target(target)
        drafter.pack(target)
        for part in shards.pending(
            f"recording {shards.count} runs of the target with the drafter: up to {shards.room}"
        ):
            run_texts, runs = texts[part.start : part.stop], list[Rollout]()
            seed, drawn = (options.seed << 32) + part.start, (found.cfg, options.depth, options.batch)
            for run in record(target, drafter, run_texts, *drawn, seed, found.sampling, rule, verifier):
                runs.append(run)
                shards.progress(len(runs))
            tensors = {f"{i} {name}": getattr(run, name) for i, run in enumerate(runs) for name in PartDials}
            shards.write(
                tensors, {"texts": [run.text for run in runs], "starts": [run.start for run in runs]}
            )

    dim = target.decoder.config.dim * (1 + len(options.aux_layers))
    size = target.length * dim * next(target.parameters()).element_size()
    room = size * (options.depth + 1) // 3  # assumes that a pass decides three codes on average
    folder, parts = found.teacher.store / f"runs-{name}", parts_of(len(texts), PART)
    shards = Shards(folder, parts, "runs", "the recorded runs", room, "runs")
    return [
        Rollout(text, **{name: tensors[f"{i} {name}"] for name in PartDials}, start=start)
        for tensors, facts in shards.build(compute).read()
        for i, (text, start) in enumerate(zip(facts["texts"], facts["starts"], strict=True))
    ]
