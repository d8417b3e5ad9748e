"""What a tree proposer asks of a drafter: the small network that guesses ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from lanternpp.nn.decoder import Decoder, Memory
from lanternpp.types import Nodes


class Drafter(nn.Module, ABC):
    """Predicts the target's next feature from the code one ahead and the feature here."""

    decoder: Decoder

    @abstractmethod
    def forward(self, ahead: Tensor, features: Tensor, nodes: Nodes, cache: Memory) -> Tensor:
        """ahead [R, N, D] embeddings of the codes one ahead, features [R, N, D] -> features [R, N, D]."""
