"""Acceptance of a drafter: pictures of held-out prompts drawn under the exact rule, and which drafted codes were kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lanternpp.accept.exact import Exact
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import engine_class
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.observers import AcceptanceByRank
from lanternpp.engine.proposer import Proposer
from lanternpp.engine.sampling import Sampling
from lanternpp.models.base import Target


@dataclass(frozen=True)
class DrawnPictures:
    """Pictures drawn with a drafter, and the acceptance of its drafts."""

    codes: Tensor  # [n, length]
    figures: dict[str, Any]


def measure_acceptance(
    target: Target, proposer: Proposer, sampling: Sampling, guidance: Guidance, prompts: Sequence[str]
) -> DrawnPictures:
    """Draw one picture per prompt, all in one batch, under the exact rule.

    Figures: codes_per_pass, the mean number of codes decided by a pass; kept_by_depth, how often a node at depth 0, 1 ...
    had a child that was kept; kept_by_rank, how often a first, second ... child was kept when it was verified;
    judged, the number of children verified, by depth and rank (as `AcceptanceByRank` counts them).
    """
    engine = engine_class(target)(target, proposer, Exact(), sampling, guidance, len(prompts))
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
