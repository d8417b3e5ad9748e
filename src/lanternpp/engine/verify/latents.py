"""Exact verification of a chain of drafted latents: speculative sampling (arXiv 2211.17192) of densities.

A latent x drawn from the drafter's density q is kept with probability min(1, p(x) / q(x)), p being the target's. The first
rejected one is replaced by a draw from the residual, which is proportional to max(0, p - q): y is drawn from p and kept
with probability max(0, 1 - q(y) / p(y)), until one is kept. That needs no integral, since the residual is nowhere above p.
A draw from p is kept as often as the draft is rejected, so that one such draw is made on average for each latent that is
verified, however near the drafter is; but where p and q are close a rejection, though rare, takes many draws. They are made
in blocks of growing size until every sample has one: a limit would change the distribution.

With diffusion heads a drafted latent x_0 is the end of a trajectory x_T, ..., x_0 of the drafter's head (continuous
speculative decoding, arXiv 2411.11925). The target's head follows the noise of the same trajectory up to its own last step
(the paper's trajectory alignment), and x_0 is verified against the Gaussian of that step, p: it was drawn from the Gaussian
of the drafter's last step, q. Given the noise of the earlier steps p and q are two known densities, and x_0 is an
independent draw from q. So under the rule `exact` the decided latent is a draw from the target's last step, at the end of a
trajectory that the target draws as it always does: its distribution is the target's own. The rule `cspd` verifies as
published, which is not exact.
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

RETRY = 1 << 20  # the purpose of the noise of the second block of draws; later blocks have the next ones
MIN_DRAWS, MAX_DRAWS = 16, 256  # of a block after the first, which has one
TRIES = 3  # draws of the published rule after a rejection; the last one stays
# Added to the purpose of a trajectory's noise, where the target's differs from the drafter's.
UNALIGNED = 1 << 19


def verify_latents(
    draft: Draft,
    logits: Tensor,
    sampling: Sampling,
    rule: Acceptance,
    noise: Noise,
    measure_tv: bool = False,
) -> Verdict:
    """A chain of N latents [B, N, C] and the target's parameters [B, N, P] at them -> the verdict, its bonus a latent.

    All levels are verified at once, each as if those before it were kept. The rule is `Exact`; a chain of the root alone is
    plain autoregressive decoding.
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
    """A chain of N latents [B, N, C] and the target's features [B, N, P] at them -> the verdict, its bonus a latent.

    The draft was drawn from this noise, as `TrajectoryProposer` does; a chain of the root alone is plain autoregressive
    decoding. aligned: whether the target's trajectories share the noise.
    """
    assert isinstance(sampling, DiffusionSampling)
    offset = 0 if aligned else UNALIGNED
    levels = range(draft.codes.shape[1])
    every = [sampling.noise(noise, Noise.DRAFT + level + offset) for level in levels]
    p = q = sampling.last_step(sampling.probs(logits), torch.stack(every, 1))
    log_factor = None
    if draft.probs is not None:
        q = torch.cat((draft.probs[:, :-1], p[:, -1:]), 1)
        if not rule.lossless:
            # parameter 0 is the sum of log standard deviations of the earlier steps (`DiffusionSampling.last_step`)
            log_factor = (q - p)[:, :-1, 0]
    return _verdict(draft, p, q, noise, sampling.channels, log_factor)


def _verdict(
    draft: Draft, p: Tensor, q: Tensor, noise: Noise, channels: int, log_factor: Tensor | None = None
) -> Verdict:
    """The verdict on a chain of latents whose mixtures are p and q [B, N, P].

    log_factor [B, N - 1]: added to log p by the published rule, which then draws its own bonus.
    """
    latents, batch = draft.codes[:, 1:], torch.arange(len(p), device=p.device)
    log_p, log_q = (GaussianMixture.of(x[:, :-1], channels).log_prob(latents) for x in (p, q))
    if log_factor is not None:
        log_p = log_p + log_factor
    good = noise.fine(Noise.ACCEPT, latents.shape[1]).log() < log_p - log_q
    last = good.long().cumprod(1).sum(1)  # [B] levels that are kept
    here, there, rejected = p[batch, last], q[batch, last], last < latents.shape[1]
    if log_factor is None:
        bonus = draw_residual(here, there, rejected, noise, channels)
    else:
        factor = log_factor[batch, last.clamp(max=latents.shape[1] - 1)]
        bonus = published_draw(here, there, rejected, factor, noise, channels)
    path = torch.arange(draft.codes.shape[1], device=p.device).minimum(last[:, None])
    return verdict_of(draft, path, last + 1, bonus)


def draw_residual(p: Tensor, q: Tensor, rejected: Tensor, noise: Noise, channels: int) -> Tensor:
    """A draw from p [B, P] or, where a draft from q [B, P] was rejected [B], from the residual [p - q]+: [B, C].

    Every sample takes the first of its own draws that is kept, so that the batch has no influence. After every block the
    host reads which samples have none yet.
    """
    left = torch.arange(len(p), device=p.device)
    found = p.new_empty(len(p), channels, dtype=torch.float32)
    for block in count():
        tries = min(MIN_DRAWS << block - 1, MAX_DRAWS) if block else 1
        mine = Noise(noise.seed[left], noise.step[left])
        u = mine.fine(RETRY + block if block else Noise.BONUS, tries, channels + 2)
        y = GaussianMixture.of(p[left], channels).draw(u[..., 1:])
        # Of y before it is rounded to float32: rounded, all of p may lie where q is greater, and none would be kept.
        log_p, log_q = (GaussianMixture.of(x[left, None], channels).log_prob(y) for x in (p, q))
        # Written so that a NaN, of weights that are broken, ends the loop.
        kept = ~(rejected[left, None] & (u[..., 0] >= -torch.expm1(log_q - log_p)))
        done, first = kept.any(1, keepdim=True), kept.byte().argmax(1)
        drawn = y.gather(1, first[:, None, None].expand(-1, 1, channels))[:, 0].float()
        found[left] = drawn.where(done, found[left])
        left = left[~done[:, 0]]  # the host waits here and nowhere else
        if not len(left):
            break
    return found


def published_draw(
    p: Tensor, q: Tensor, rejected: Tensor, log_factor: Tensor, noise: Noise, channels: int
) -> Tensor:
    """A draw from p [B, P] or, where a draft from q [B, P] was rejected [B], as the paper draws: [B, C].

    y is drawn from p and kept with probability [1 - q(y) / (Sigma p(y))]+, log_factor [B] being the logarithm of Sigma.
    """
    u = noise.fine(Noise.BONUS, TRIES, channels + 2)
    y = GaussianMixture.of(p, channels).draw(u[..., 1:])
    log_p, log_q = (GaussianMixture.of(x[:, None], channels).log_prob(y) for x in (p, q))
    kept = ~(rejected[:, None] & (u[..., 0] >= -torch.expm1(log_q - log_p - log_factor[:, None])))
    kept[:, -1] = True
    return y[torch.arange(len(y), device=y.device), kept.byte().argmax(1)].float()
