"""A smaller target as drafter: the original speculative sampling (arXiv 2211.17192, 2302.01318)."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn.decoder import AttentionCache
from lanternpp.proposers.network import AutoregressiveProposer
from lanternpp.types import Admission, Nodes

# greatest relative distance (Frobenius norm) between two copies of a codebook, stored differently
MAX_DISTANCE = 0.05


class DraftModel(AutoregressiveProposer):
    """Encodes the same prompt itself and drafts from its own distribution, with the target's guidance scale."""

    needs = "independent"
    drafter: Target

    def check(self, target: Target) -> None:
        """InputError unless both have the same codebook and the same number of codes per image."""
        super().check(target)
        ours, theirs = (self.drafter.vocab, self.drafter.length), (target.vocab, target.length)
        if ours != theirs:
            raise InputError(
                f"the drafter draws {ours[1]} of {ours[0]} codes and the target {theirs[1]} of {theirs[0]}; "
                "use a drafter of the target's own codes"
            )
        mine, book = self.drafter.codebook, target.codebook
        if mine is None or book is None:
            return
        if (
            mine.shape != book.shape
            or (mine.float() - book.float()).norm() > MAX_DISTANCE * book.float().norm()
        ):
            raise InputError(
                "the drafter's codebook is another than the target's, so that the same code has another meaning; "
                "use a drafter trained on the codes of the target's own tokenizer"
            )

    def drafter_forward(self, codes: Tensor, below: Tensor, nodes: Nodes, cache: AttentionCache) -> Tensor:
        """As in the base class, without the parents' features."""
        return self.drafter(self.guidance.rows(self.drafter.embed(codes)), nodes, cache)

    @property
    def head(self) -> Target:
        """The smaller target."""
        return self.drafter

    def begin(self, new: Admission) -> None:
        """Prefill the drafter with its own prompt and the root."""
        super().begin(new)
        try:
            prompt = self.drafter.prompt([new.condition], self.guidance.branches)
        except InputError as error:
            warnings.warn(f"the drafter drafts without the prompt: {error}", stacklevel=2)
            prompt = self.drafter.prompt([None], self.guidance.branches)
        first = self.drafter.embed(new.root[:, None]).expand(len(new.rows), -1, -1)
        embeds = torch.cat((prompt.embeds.to(first.dtype), first), 1)
        prompt_cache = self.cache.rows(new.rows, prompt.start, embeds.shape[1])
        self.features[new.rows, 0] = prompt_cache.prefill(self.drafter, embeds)[:, -1]
