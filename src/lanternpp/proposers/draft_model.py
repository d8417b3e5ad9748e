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

MAX_DISTANCE = (
    0.05  # relative (Frobenius norm), between copies of a codebook that are stored in different dtypes
)


class DraftModel(AutoregressiveProposer):
    """Drafts from the distribution of a smaller target, which encodes the prompt itself, with the target's guidance scale."""

    needs = "independent"
    drafter: Target

    def check(self, target: Target) -> None:
        """InputError unless both models have the same codebook and the same number of codes per image."""
        super().check(target)
        drafter = self.drafter
        if (drafter.vocab, drafter.length) != (target.vocab, target.length):
            raise InputError(
                f"the drafter draws {drafter.length} of {drafter.vocab} codes and the target {target.length} of {target.vocab}; "
                "use a drafter of the target's own codes"
            )
        if drafter.codebook is None or target.codebook is None:
            return
        codebook, expected = drafter.codebook.float(), target.codebook.float()
        if codebook.shape != expected.shape or (codebook - expected).norm() > MAX_DISTANCE * expected.norm():
            raise InputError(
                "the drafter's codebook is another than the target's, so that the same code has another meaning; "
                "use a drafter trained on the codes of the target's own tokenizer"
            )

    def drafter_forward(self, codes: Tensor, features: Tensor, nodes: Nodes, cache: AttentionCache) -> Tensor:
        """Run the smaller target over codes [B, N] -> features [R, N, D]; it reads no features at their parents."""
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
        root = self.drafter.embed(new.root[:, None]).expand(len(new.rows), -1, -1)
        embeds = torch.cat((prompt.embeds.to(root.dtype), root), 1)
        prompt_cache = self.cache.rows(new.rows, prompt.start, embeds.shape[1])
        self.features[new.rows, 0] = prompt_cache.prefill(self.drafter, embeds)[:, -1]
