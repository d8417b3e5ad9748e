"""What the engine asks of a proposer: a draft before every pass."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lanternpp.engine.guidance import Guidance
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.targets.base import Target
from lanternpp.types import Draft, Look, Prompt


class Proposer(ABC):
    """Offers drafts of `size` nodes, the root included, and `depth` levels below it."""

    size: int
    depth: int
    root: Tensor  # [B] the code each draft starts from

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
