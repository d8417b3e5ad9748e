"""Drafting with an EAGLE drafter and a tree builder (arXiv 2401.15077, section 3)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lanternpp.drafters.base import Drafter
from lanternpp.drafters.eagle import DiffusionDrafter, check_heads
from lanternpp.engine.latents import DiffusionSampling
from lanternpp.engine.noise import Noise
from lanternpp.engine.proposer import LATENTS_MESSAGE
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn.decoder import AttentionCache
from lanternpp.proposers.network import AutoregressiveProposer
from lanternpp.trees.base import Extend
from lanternpp.types import Admission, Draft, Frontier, Nodes


class TreeProposer(AutoregressiveProposer):
    """Feeds the drafter the target's features for decided codes and the drafter's own features within a draft.

    The drafter's input at a position is its feature and the embedding of the code at the next position, so that the
    drafter's cache holds one position less than the target's: the root takes the place of the prompt's first slot.
    """

    needs = "drafter"
    drafter: Drafter

    def check(self, target: Target) -> None:
        """InputError where the target predicts latents and the tree is no drawn chain, or where the heads differ in kind."""
        if target.channels and not (self.builder.chain and self.builder.drawn):
            raise InputError(LATENTS_MESSAGE)
        check_heads(target, self.drafter)

    def drafter_forward(self, codes: Tensor, features: Tensor, nodes: Nodes, cache: AttentionCache) -> Tensor:
        """Run the drafter over codes [B, N] with features [R, N, D] at their parents."""
        return self.drafter(
            self.guidance.rows(self.drafter.embed(self.target, codes)), features, nodes, cache
        )

    def begin(self, new: Admission) -> None:
        """Prefill the drafter with the prompt's features, each paired with the input at the next position."""
        super().begin(new)
        root = self.drafter.embed(self.target, new.root[:, None]).expand(len(new.rows), -1, -1)
        prompt = self.drafter.prompt_inputs(new.prompt.embeds[:, 1:].to(root.dtype))
        next_embeds = torch.cat((prompt, root), 1)
        start = new.prompt.start * (not self.drafter.attends_to_padding)
        prompt_cache = self.cache.rows(new.rows, start, new.features.shape[1])
        self.features[new.rows, 0] = prompt_cache.prefill(self.drafter, next_embeds, new.features)[:, -1]


class TrajectoryProposer(TreeProposer):
    """Drafts a chain of latents by a diffusion head (arXiv 2411.11925). `probs` are the Gaussians of the trajectories' last steps."""

    drafter: DiffusionDrafter
    sampling: DiffusionSampling

    def open(self, target: Target, sampling: Sampling, guidance: Guidance, batch: int) -> None:
        """Allocate the state of a batch, and draw by the drafter's own head."""
        super().open(target, sampling, guidance, batch)
        assert isinstance(sampling, DiffusionSampling)
        self.sampling = replace(sampling, denoiser=self.drafter.denoiser)

    def grow(self, q: Tensor, extend: Extend, noise: Noise) -> Draft:
        """Grow a draft from q [B, branches D], the features of the root's child; every trajectory is computed once."""
        sampling = self.sampling
        level_noise = [sampling.noise(noise, Noise.DRAFT + level, 1) for level in range(self.depth)]

        def children(q: Tensor, count: int, level: int) -> Tensor:
            return sampling.end(q, level_noise[level])[:, :, None]

        def extend_latents(frontier: Frontier) -> Tensor:
            return sampling.last_step(extend(frontier), level_noise[frontier.level])

        root_q = sampling.last_step(q[:, None], level_noise[0])[:, 0]
        return self.builder.grow(self.root, root_q, extend_latents, children)
