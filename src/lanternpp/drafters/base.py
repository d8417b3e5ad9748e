"""What a tree proposer asks of a drafter: the small network that guesses ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from lanternpp.nn.decoder import Decoder, Memory
from lanternpp.nn.sources import Source
from lanternpp.targets.base import Target
from lanternpp.types import Nodes


class Drafter(nn.Module, ABC):
    """Predicts the target's next feature from the code one ahead and the feature here."""

    decoder: Decoder
    about: ClassVar[str] = ""  # the checkpoints it reads, for the message about one that nobody reads
    proposer: ClassVar[str] = "lanternpp.proposers.tree:TreeProposer"  # what drafts with it: (drafter, tree)

    @classmethod
    def claims(cls, source: Source) -> bool:
        """Whether a checkpoint without our own `kind` is one of these, by its config, its names and shapes."""
        return False

    @classmethod
    def read(cls, source: Source, target: Target, dtype: torch.dtype) -> Self:
        """The drafter in `source` for this target, on the CPU; InputError where it is another target's."""
        raise NotImplementedError

    def sees(self, prompt: Tensor) -> Tensor:
        """What it sees of a prompt whose inputs one ahead are [R, T - 1, D]; the same shape."""
        return prompt

    @abstractmethod
    def forward(self, ahead: Tensor, features: Tensor, nodes: Nodes, cache: Memory) -> Tensor:
        """ahead [R, N, D] embeddings of the codes one ahead, features [R, N, D] -> features [R, N, D]."""


class QueryDrafter(Drafter):
    """Looks at all levels of a draft in one pass, on guided features, in one row per sample."""

    @abstractmethod
    def forward(
        self, ahead: Tensor, features: Tensor, nodes: Nodes, cache: Memory, hints: Tensor | None = None
    ) -> Tensor:
        """N known places and Q more `nodes`, queries, where no code is known yet -> features [B, N + Q, D].

        hints [B, N + Q, D]: what the target thought, on codes it refused, of the features asked for; or 0.
        """

    @abstractmethod
    def after(self, features: Tensor, before: Tensor) -> Tensor:
        """Features of a level [..., D] and embeddings of the codes drafted before it [..., D] -> features [..., D]."""
