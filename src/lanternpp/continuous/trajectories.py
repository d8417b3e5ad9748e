"""Drafts of a diffusion head, and the verification of a chain of latents that two such heads drew (continuous speculative decoding, arXiv 2411.11925).

A drafted latent x_0 is the end of a trajectory x_T, ..., x_0 of the drafter's head. The target's head runs along the noise of the same
trajectory up to its own last step (the paper's trajectory alignment), and x_0 is verified against the Gaussian of that step, p:
it was drawn from the Gaussian of the drafter's last step, q. Given the noise of the earlier steps p and q are two known densities,
and x_0 is an independent draw from q. So under the rule `exact`, which is that of `verify.py`, what is decided is a draw from
the target's last step, at the end of a trajectory that the target draws as it always does: its law is the target's own.
The rule `cspd` verifies as published, which is not exact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.continuous.diffusion import DiffusionDrafter, DiffusionSampling
from lanternpp.continuous.mixture import GaussianMixture
from lanternpp.continuous.verify import draw_beyond, kept_levels, verdict_at
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.proposers.tree import TreeProposer
from lanternpp.types import Draft, Frontier, Verdict

TRIES = 3  # draws of the published rule after a refusal, of which the last one stays
APART = 1 << 19  # added to the purpose of a trajectory's noise, where the target's differs from the drafter's


class TrajectoryProposer(TreeProposer):
    """Drafts a chain of latents by a diffusion head. `probs` of its drafts are the Gaussians that the trajectories ended with."""

    drafter: DiffusionDrafter
    sampling: DiffusionSampling

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


def verify_trajectories(
    draft: Draft,
    logits: Tensor,
    sampling: Sampling,
    rule: Acceptance,
    noise: Noise,
    measure_tv: bool = False,
    aligned: bool = True,
) -> Verdict:
    """A chain of N latents [B, N, C] and the target's features [B, N, P] at them -> what is kept, and a latent behind it.

    draft: drawn from this noise, as `TrajectoryProposer` does; a chain of the root alone is plain autoregressive decoding. aligned:
    whether the target's trajectories share the noise.
    """
    assert isinstance(sampling, DiffusionSampling)
    depth, batch = draft.codes.shape[1] - 1, torch.arange(len(logits), device=logits.device)
    apart = 0 if aligned else APART
    every = [sampling.noise(noise, Noise.DRAFT + level + apart) for level in range(depth + 1)]
    p = q = sampling.last_step(sampling.probs(logits), torch.stack(every, 1))
    log_factor = None
    if draft.probs is not None:
        q = torch.cat((draft.probs[:, :-1], p[:, -1:]), 1)
        if not rule.lossless:
            log_factor = (q - p)[:, :-1, 0]
    last = kept_levels(draft.codes, p, q, noise, sampling.channels, log_factor)
    here, there, refused = p[batch, last], q[batch, last], last < depth
    if log_factor is None:
        bonus = draw_beyond(here, there, refused, noise, sampling.channels)
    else:
        factor = log_factor[batch, last.clamp(max=depth - 1)]
        bonus = published_draw(here, there, refused, factor, noise, sampling.channels)
    return verdict_at(draft.codes, last, bonus)


def published_draw(
    p: Tensor, q: Tensor, refused: Tensor, log_factor: Tensor, noise: Noise, channels: int
) -> Tensor:
    """A draw from p [B, P] or, where a draft from q [B, P] was refused [B], as the paper draws: [B, C].

    y is drawn from p and kept with probability [1 - q(y) / (Sigma p(y))]+, log_factor [B] being the logarithm of Sigma.
    """
    u = noise.fine(Noise.BONUS, TRIES, channels + 2)
    y = GaussianMixture.of(p, channels).draw(u[..., 1:])
    log_p, log_q = (GaussianMixture.of(law[:, None], channels).log_prob(y) for law in (p, q))
    kept = ~(refused[:, None] & (u[..., 0] >= -torch.expm1(log_q - log_p - log_factor[:, None])))
    kept[:, -1] = True
    return y[torch.arange(len(y), device=y.device), kept.byte().argmax(1)].float()
