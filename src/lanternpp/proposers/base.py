"""What the engine asks of a proposer: a draft before every pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lanternpp.drafters.base import Drafter
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.targets.base import Target
from lanternpp.trees.base import TreeBuilder
from lanternpp.types import Draft, Look, Prompt


@dataclass(frozen=True)
class Parts:
    """What a proposer may be built from; each takes what it needs."""

    drafter: Callable[[], Drafter]
    tree: Callable[[], TreeBuilder]
    window: int | None = None
    coupling: str | None = None
    fresh: str | None = None


class Proposer(ABC):
    """Offers drafts of `size` nodes, the root included, and `depth` levels below it."""

    size: int
    depth: int
    root: Tensor  # [B] the code each draft starts from

    @classmethod
    @abstractmethod
    def build(cls, parts: Parts) -> Self:
        """A proposer of these parts; InputError where one is missing."""

    def open(self, target: Target, sampling: Sampling, guidance: Guidance, batch: int) -> None:
        """Make room for a batch; called once, before anything else."""
        self.root = torch.zeros(batch, dtype=torch.int64, device=next(target.parameters()).device)

    def begin(self, slot: int, rows: Tensor, prompt: Prompt, features: Tensor, root: Tensor) -> None:
        """A sample enters at `slot` of the batch, at `rows` [r]; the other samples stand still.

        prompt of r rows, features [r, T, D] of its slots, root [1] the first code.
        """
        self.root[slot] = root[0]

    @abstractmethod
    def propose(self, noise: Noise) -> Draft:
        """A draft for every sample."""

    def observe(self, look: Look) -> None:
        """Learn what was decided."""
        self.root.copy_(look.verdict.bonus)
