"""Drafts of continuous latents by a diffusion head (continuous speculative decoding, arXiv 2411.11925)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from lanternpp.drafters.eagle import DiffusionDrafter
from lanternpp.engine.latents import DiffusionSampling
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.models.base import Target
from lanternpp.proposers.tree import TreeProposer
from lanternpp.types import Draft, Frontier


class TrajectoryProposer(TreeProposer):
    """Drafts a chain of latents by a diffusion head. `probs` of its drafts are the Gaussians of the trajectories' last steps."""

    drafter: DiffusionDrafter
    sampling: DiffusionSampling

    def open(self, target: Target, sampling: Sampling, guidance: Guidance, batch: int) -> None:
        """Allocate the state of a batch, and draw by the drafter's own head."""
        super().open(target, sampling, guidance, batch)
        assert isinstance(sampling, DiffusionSampling)
        self.sampling = replace(sampling, denoiser=self.drafter.denoiser)

    def grow(self, q: Tensor, extend: Callable[[Frontier], Tensor], noise: Noise) -> Draft:
        """Grow a draft from q [B, branches D], the features of the root's child; every trajectory is computed once."""
        sampling = self.sampling
        level_noise = [sampling.noise(noise, Noise.DRAFT + level, 1) for level in range(self.depth)]

        def children(q: Tensor, count: int, level: int) -> Tensor:
            return sampling.end(q, level_noise[level])[:, :, None]

        def extend_latents(frontier: Frontier) -> Tensor:
            return sampling.last_step(extend(frontier), level_noise[frontier.level])

        root_q = sampling.last_step(q[:, None], level_noise[0])[:, 0]
        return self.builder.grow(self.root, root_q, extend_latents, children)
