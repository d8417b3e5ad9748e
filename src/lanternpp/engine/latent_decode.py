"""The decoding loop over latents: the loop of `decode.py`, with vectors of C numbers in the place of codes.

Drafts are verified exactly, by speculative sampling (arXiv 2211.17192) of densities.

A latent x drawn from the drafter's density q is kept with probability min(1, p(x) / q(x)), p being the target's. The first
rejected latent is replaced by a draw from the residual, which is proportional to max(0, p - q): latents y are drawn from p
and kept with probability max(0, 1 - q(y) / p(y)), until one is kept. This rejection sampling needs no integral, since the
residual is nowhere above p. A y is kept as often as the draft is rejected, so that one y is drawn on average for each
verified latent, however near the drafter is; but where p and q are close a rejection, though rare, takes many draws. They
are made in blocks of growing size until every sample has a kept y: a limit would change the distribution.

With diffusion heads a drafted latent x_0 is the end of a trajectory x_T, ..., x_0 of the drafter's head (continuous
speculative decoding, arXiv 2411.11925). The target's head follows the noise of the same trajectory up to its own last step
(the paper's trajectory alignment), and x_0, which was drawn from the Gaussian of the drafter's last step, q, is verified
against the Gaussian of the target's last step, p. Given the noise of the earlier steps p and q are two known densities, and
x_0 is an independent draw from q. So under the rule `exact` the decided latent is a draw from the target's last step, at the
end of a trajectory that the target draws as it always does: its distribution is the target's own. The rule `cspd` verifies
as published, which is not exact.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.engine.decode import Engine
from lanternpp.engine.latents import (
    DiffusionGuidance,
    DiffusionSampling,
    GaussianMixture,
    MixtureGuidance,
    MixtureSampling,
)
from lanternpp.engine.noise import Noise
from lanternpp.engine.proposer import LATENTS_MESSAGE
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.engine.verify import Verifier
from lanternpp.engine.verify.tokenwise import verdict_of, verify_tokenwise
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.models.latents import DiffusionTarget
from lanternpp.types import Draft, Verdict

RETRY = 1 << 20  # block i of draws, i = 1, 2 .., has noise of the purpose RETRY + i
MIN_DRAWS, MAX_DRAWS = 16, 256  # draws of a block after the first block, which has one draw
TRIES = 3  # draws of the published rule after a rejection; the last draw is always kept


class LatentEngine(Engine):
    """Decodes latents, drawn from mixtures or by a diffusion head. `codes` [B, length, C], a finished sample's too, are float32."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.codes = self.codes.new_zeros(*self.codes.shape, self.target.channels, dtype=torch.float32)
        self.proposer.root = self.codes[:, 0].clone()

    @classmethod
    def check(cls, target: Target, rule: Acceptance, verifier: Verifier) -> None:
        """Check that the rule and the verifier are for these latents; raise InputError if not."""
        diffusion = isinstance(target, DiffusionTarget)
        if not (rule.lossless or (rule.trajectories and diffusion)):
            alternative = " or cspd" if diffusion else ""
            raise InputError(
                "this model draws continuous latents, for which there is no such relaxed rule: use --accept "
                f"exact{alternative}"
            )
        if verifier is not verify_tokenwise:
            raise InputError(LATENTS_MESSAGE)

    def parts(
        self, target: Target, sampling: Sampling, guidance: Guidance, verifier: Verifier
    ) -> tuple[MixtureSampling, Guidance, Verifier]:
        """Return sampling, guidance and verifier of latents; with a diffusion head guidance is part of every step."""
        warp = (*sampling.warp, target.channels)
        if not isinstance(target, DiffusionTarget):
            return MixtureSampling(*warp), MixtureGuidance(guidance.scale, target.channels), verify_latents
        steps = target.config.denoising_steps
        diffusion = DiffusionSampling(*warp, steps, guidance.scale, denoiser=target.denoiser)
        return diffusion, DiffusionGuidance(guidance.scale), verify_latents


def verify_latents(
    draft: Draft,
    logits: Tensor,
    sampling: Sampling,
    rule: Acceptance,
    noise: Noise,
    measure_tv: bool = False,
) -> Verdict:
    """Verify a chain of N latents [B, N, C] by the target's parameters or features [B, N, P] at the latents; the bonus is a latent.

    All levels are verified at once, each as if all earlier levels were kept. The rule is `Exact` or, for trajectories, `Cspd`.
    The draft was drawn from this noise. A chain of the root alone is plain autoregressive decoding.
    """
    assert isinstance(sampling, MixtureSampling)
    channels, latents = sampling.channels, draft.codes[:, 1:]  # [B, N - 1, C]
    num_levels = latents.shape[1]
    p = q = sampling.mixtures(logits, noise)
    if draft.probs is not None:
        q = torch.cat((draft.probs[:, :-1], p[:, -1:]), 1)
    log_p, log_q = (GaussianMixture.of(x[:, :-1], channels).log_prob(latents) for x in (p, q))
    if not rule.lossless:
        # Parameter 0 is the sum of log standard deviations of the earlier steps (`DiffusionSampling.last_step`).
        log_factor = (q - p)[..., 0]  # [B, N]; 0 after the last level, where nothing is rejected
        log_p = log_p + log_factor[:, :-1]
    accepts = noise.fine(Noise.ACCEPT, num_levels).log() < log_p - log_q  # [B, N - 1]
    num_accepted = accepts.long().cumprod(1).sum(1)  # [B], also the id of the last kept node
    batch = torch.arange(len(p), device=p.device)
    last = p[batch, num_accepted], q[batch, num_accepted], num_accepted < num_levels
    if rule.lossless:
        bonus = draw_residual(*last, noise, channels)
    else:
        # As published: y is drawn from p and kept with probability [1 - q(y) / (Sigma p(y))]+, the last y always.
        u = noise.fine(Noise.BONUS, TRIES, channels + 2)
        y, kept = _draws(*last, u, channels, log_factor[batch, num_accepted])
        kept[:, -1] = True
        bonus = _first_kept(y, kept)
    path = torch.arange(draft.codes.shape[1], device=p.device).minimum(num_accepted[:, None])
    return verdict_of(draft, path, num_accepted + 1, bonus)


def draw_residual(p: Tensor, q: Tensor, rejected: Tensor, noise: Noise, channels: int) -> Tensor:
    """Draw from p [B, P] or, where a draft from q [B, P] was rejected [B], from the residual [p - q]+: latents [B, C].

    Every sample takes the first kept one of its own draws, so that the batch has no influence. After every block the host
    reads which samples have no latent yet.
    """
    undecided = torch.arange(len(p), device=p.device)  # [b] samples without a latent
    latents = p.new_empty(len(p), channels, dtype=torch.float32)
    for block in count():
        tries = min(MIN_DRAWS << block - 1, MAX_DRAWS) if block else 1  # M
        block_noise = Noise(noise.seed[undecided], noise.step[undecided])
        u = block_noise.fine(RETRY + block if block else Noise.BONUS, tries, channels + 2)
        y, kept = _draws(p[undecided], q[undecided], rejected[undecided], u, channels)
        decided = kept.any(1, keepdim=True)  # [b, 1]
        latents[undecided] = _first_kept(y, kept).where(decided, latents[undecided])
        undecided = undecided[~decided[:, 0]]  # the only wait of the host
        if not len(undecided):
            break
    return latents


def _draws(
    p: Tensor, q: Tensor, rejected: Tensor, u: Tensor, channels: int, log_factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw y from p by uniform u [B, M, C + 2]; return y [B, M, C] in float64, and whether each is kept, [B, M]."""
    y = GaussianMixture.of(p, channels).draw(u[..., 1:])
    # y is not rounded to float32 yet: once rounded, all draws from p may lie where q is greater, and none would be kept.
    log_p, log_q = (GaussianMixture.of(x[:, None], channels).log_prob(y) for x in (p, q))
    if log_factor is not None:
        log_p = log_p + log_factor[:, None]
    # Written with `~` and `>=` so that a NaN, from broken weights, keeps y and ends the loop.
    return y, ~(rejected[:, None] & (u[..., 0] >= -torch.expm1(log_q - log_p)))


def _first_kept(y: Tensor, kept: Tensor) -> Tensor:
    """Return the first kept one of draws y [B, M, C], [B, C] float32."""
    index = kept.byte().argmax(1)[:, None, None].expand(-1, 1, y.shape[2])
    return y.gather(1, index)[:, 0].float()
