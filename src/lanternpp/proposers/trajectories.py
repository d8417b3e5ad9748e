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
        """Allocate the state of a batch; the drafter's own head draws."""
        super().open(target, sampling, guidance, batch)
        assert isinstance(sampling, DiffusionSampling)
        self.sampling = replace(sampling, denoiser=self.drafter.denoiser)

    def grow(self, q: Tensor, extend: Callable[[Frontier], Tensor], noise: Noise) -> Draft:
        """q [B, branches D], the features of the root's child -> a draft; every trajectory is computed once."""
        sampling = self.sampling
        every = [sampling.noise(noise, Noise.DRAFT + level, 1) for level in range(self.depth)]

        def last_step(features: Tensor, level: int) -> Tensor:
            return sampling.last_step(features, every[level])

        def children(q: Tensor, count: int, level: int) -> Tensor:
            return sampling.end(q, every[level])[:, :, None]

        def below(at: Frontier) -> Tensor:
            return last_step(extend(at), at.level)

        return self.builder.grow(self.root, last_step(q[:, None], 0)[:, 0], below, children)
