"""How well a drafter drafts: pictures of held-out prompts, drawn without loss, and what was kept of every draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lanternpp.accept.exact import Exact
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.observers import AcceptanceByRank
from lanternpp.engine.proposer import Proposer
from lanternpp.engine.sampling import Sampling
from lanternpp.targets.base import Target


@dataclass(frozen=True)
class DrawnPictures:
    """Pictures drawn with a drafter, and what was kept of its drafts."""

    codes: Tensor  # [n, length]
    figures: dict[str, Any]


def measure_acceptance(
    target: Target, proposer: Proposer, sampling: Sampling, guidance: Guidance, prompts: Sequence[str]
) -> DrawnPictures:
    """One picture per prompt, all at once, without loss.

    Figures: codes_per_pass; kept_by_depth, how often the walk went on from a node at depth 0, 1 ...; kept_by_rank,
    how often a first, second ... child was kept once its turn came; judged, the children whose turn came by depth and rank,
    as `AcceptanceByRank` counts them.
    """
    engine = Engine(target, proposer, Exact(), sampling, guidance, len(prompts))
    counts = AcceptanceByRank(target.length)
    engine.observers.append(counts)
    finished = generate(engine, list(prompts), list(range(len(prompts))))
    passes = [count for sample in finished for count in sample.accepted]
    tried, kept = counts.tried.cpu(), counts.kept.cpu()
    figures = {
        "codes_per_pass": sum(passes) / len(passes),
        "kept_by_depth": quotients(kept.sum(1), tried[:, 0]),
        "kept_by_rank": quotients(kept.sum(0), tried.sum(0)),
        "judged": tried.tolist(),
    }
    return DrawnPictures(torch.stack([sample.codes for sample in finished]), figures)


def quotients(part: Tensor, whole: Tensor) -> list[float | None]:
    """Quotients of counts, to four digits; None where nothing was counted."""
    pairs = zip(part.tolist(), whole.tolist(), strict=True)
    return [round(a / b, 4) if b else None for a, b in pairs]
