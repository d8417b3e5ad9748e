"""Exact verification of a chain of drafted latents: speculative sampling (arXiv 2211.17192) of densities.

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

import torch
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.engine.latents import DiffusionSampling, GaussianMixture, MixtureSampling
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.tokenwise import verdict_of
from lanternpp.types import Draft, Verdict

RETRY = 1 << 20  # block i of draws, i = 1, 2 .., has noise of the purpose RETRY + i
MIN_DRAWS, MAX_DRAWS = 16, 256  # draws of a block after the first block, which has one draw
TRIES = 3  # draws of the published rule after a rejection; the last draw is always kept
UNALIGNED = 1 << 19  # added to the purpose of the target's noise where it differs from the drafter's


def verify_latents(
    draft: Draft,
    logits: Tensor,
    sampling: Sampling,
    rule: Acceptance,
    noise: Noise,
    measure_tv: bool = False,
) -> Verdict:
    """Verify a chain of N latents [B, N, C] by the target's parameters [B, N, P] at the latents; the bonus is a latent.

    All levels are verified at once, each as if all earlier levels were kept. The rule is `Exact`; a chain of the root alone
    is plain autoregressive decoding.
    """
    assert isinstance(sampling, MixtureSampling)
    p = sampling.probs(logits)
    q = p if draft.probs is None else draft.probs
    return _verdict(draft, p, q, noise, sampling.channels)


def verify_trajectories(
    draft: Draft,
    logits: Tensor,
    sampling: Sampling,
    rule: Acceptance,
    noise: Noise,
    measure_tv: bool = False,
    aligned: bool = True,
) -> Verdict:
    """Verify a chain of N latents [B, N, C] by the target's features [B, N, P] at the latents; the bonus is a latent.

    The draft was drawn from this noise, as `TrajectoryProposer` does; a chain of the root alone is plain autoregressive
    decoding. aligned: whether the target's trajectories share the noise.
    """
    assert isinstance(sampling, DiffusionSampling)
    purpose = Noise.DRAFT if aligned else Noise.DRAFT + UNALIGNED  # + the level
    trajectory_noise = [sampling.noise(noise, purpose + level) for level in range(draft.codes.shape[1])]
    p = q = sampling.last_step(sampling.probs(logits), torch.stack(trajectory_noise, 1))
    log_factor = None
    if draft.probs is not None:
        q = torch.cat((draft.probs[:, :-1], p[:, -1:]), 1)
        if not rule.lossless:
            # Parameter 0 is the sum of log standard deviations of the earlier steps (`DiffusionSampling.last_step`).
            log_factor = (q - p)[:, :-1, 0]
    return _verdict(draft, p, q, noise, sampling.channels, log_factor)


def _verdict(
    draft: Draft, p: Tensor, q: Tensor, noise: Noise, channels: int, log_factor: Tensor | None = None
) -> Verdict:
    """Return the verdict on a chain of latents whose mixtures are p and q [B, N, P].

    log_factor [B, N - 1]: added to log p by the published rule, which then draws the bonus in its own way.
    """
    latents = draft.codes[:, 1:]  # [B, N - 1, C]
    num_levels = latents.shape[1]
    log_p, log_q = (GaussianMixture.of(x[:, :-1], channels).log_prob(latents) for x in (p, q))
    if log_factor is not None:
        log_p = log_p + log_factor
    accepts = noise.fine(Noise.ACCEPT, num_levels).log() < log_p - log_q  # [B, N - 1]
    num_accepted = accepts.long().cumprod(1).sum(1)  # [B], also the id of the last kept node
    rejected = num_accepted < num_levels
    batch = torch.arange(len(p), device=p.device)
    last_p, last_q = p[batch, num_accepted], q[batch, num_accepted]  # [B, P]
    if log_factor is None:
        bonus = draw_residual(last_p, last_q, rejected, noise, channels)
    else:
        last_factor = log_factor[batch, num_accepted.clamp(max=num_levels - 1)]
        bonus = published_draw(last_p, last_q, rejected, last_factor, noise, channels)
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
        y = GaussianMixture.of(p[undecided], channels).draw(u[..., 1:])  # [b, M, C]
        # y is not rounded to float32 yet: once rounded, all draws from p may lie where q is greater, and none would be kept.
        log_p, log_q = (GaussianMixture.of(x[undecided, None], channels).log_prob(y) for x in (p, q))
        # Written with `~` and `>=` so that a NaN, from broken weights, keeps y and ends the loop.
        kept = ~(rejected[undecided, None] & (u[..., 0] >= -torch.expm1(log_q - log_p)))  # [b, M]
        decided = kept.any(1, keepdim=True)  # [b, 1]
        first_kept = kept.byte().argmax(1)[:, None, None].expand(-1, 1, channels)
        latents[undecided] = y.gather(1, first_kept)[:, 0].float().where(decided, latents[undecided])
        undecided = undecided[~decided[:, 0]]  # the only wait of the host
        if not len(undecided):
            break
    return latents


def published_draw(
    p: Tensor, q: Tensor, rejected: Tensor, log_factor: Tensor, noise: Noise, channels: int
) -> Tensor:
    """Draw from p [B, P] or, where a draft from q [B, P] was rejected [B], as the paper does: latents [B, C].

    y is drawn from p and kept with probability [1 - q(y) / (Sigma p(y))]+, log_factor [B] being the logarithm of Sigma.
    """
    u = noise.fine(Noise.BONUS, TRIES, channels + 2)
    y = GaussianMixture.of(p, channels).draw(u[..., 1:])
    log_p, log_q = (GaussianMixture.of(x[:, None], channels).log_prob(y) for x in (p, q))
    kept = ~(rejected[:, None] & (u[..., 0] >= -torch.expm1(log_q - log_p - log_factor[:, None])))
    kept[:, -1] = True
    return y[torch.arange(len(y), device=y.device), kept.byte().argmax(1)].float()
