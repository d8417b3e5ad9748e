"""Exact verification of a chain of drafted latents: speculative sampling (arXiv 2211.17192) of densities.

A latent x drawn from the drafter's density q is kept with probability min(1, p(x) / q(x)), p being the target's. The first
one that is refused is replaced by a draw from the residual law, which is proportional to max(0, p - q): y is drawn from p and
kept with probability max(0, 1 - q(y) / p(y)), until one is kept. That needs no integral, since the residual is nowhere above p.
The chance that a draw from p is kept is the chance that the draft was refused, so that one such draw is made on average for
each latent that is verified, however near the drafter is; but where p and q are close a refusal, though rare, takes many draws. They are made in
blocks of growing size until every sample has one: a limit would change the law.
"""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.continuous.mixture import GaussianMixture, MixtureSampling
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.types import Draft, Verdict

RETRY = 1 << 20  # the purpose of the noise of the second block of draws; later blocks have the next ones
FEWEST, MOST = 16, 256  # draws of a block after the first, which has one


def verify_latents(
    draft: Draft, logits: Tensor, sampling: Sampling, rule: Acceptance, noise: Noise, measure_tv: bool = False
) -> Verdict:
    """A chain of N latents [B, N, C] and the target's parameters [B, N, P] at them -> what is kept, and a latent behind it.

    All levels are verified at once, each as if those before it were kept. The rule is `Exact`; a chain of the root alone is
    plain autoregressive decoding.
    """
    assert isinstance(sampling, MixtureSampling)
    channels, p = sampling.channels, sampling.probs(logits)
    q = p if draft.probs is None else draft.probs
    last = kept_levels(draft.codes, p, q, noise, channels)
    batch = torch.arange(len(logits), device=logits.device)
    refused = last < draft.codes.shape[1] - 1
    bonus = draw_beyond(p[batch, last], q[batch, last], refused, noise, channels)
    return verdict_at(draft.codes, last, bonus)


def kept_levels(
    codes: Tensor, p: Tensor, q: Tensor, noise: Noise, channels: int, log_factor: Tensor | None = None
) -> Tensor:
    """How many levels of a chain of latents [B, N, C] are kept, [B], its mixtures being p and q [B, N, P].

    log_factor [B, N - 1]: added to log p.
    """
    latents = codes[:, 1:]
    log_p, log_q = (GaussianMixture.of(law[:, :-1], channels).log_prob(latents) for law in (p, q))
    if log_factor is not None:
        log_p = log_p + log_factor
    good = noise.fine(Noise.ACCEPT, latents.shape[1]).log() < log_p - log_q
    return good.long().cumprod(1).sum(1)


def verdict_at(codes: Tensor, last: Tensor, bonus: Tensor) -> Verdict:
    """The verdict that keeps so many levels [B] of a chain of latents [B, N, C], with `bonus` [B, C] behind them."""
    path = torch.arange(codes.shape[1], device=codes.device).expand(len(codes), -1)
    following = torch.cat((codes[:, 1:], bonus[:, None]), 1)
    ends = (path == last[:, None])[..., None]
    path = path.minimum(last[:, None])
    return Verdict(path, last + 1, torch.where(ends, bonus[:, None], following), bonus)


def draw_beyond(p: Tensor, q: Tensor, refused: Tensor, noise: Noise, channels: int) -> Tensor:
    """A draw from p [B, P] or, where a draft from q [B, P] was refused [B], from what p has beyond q: [B, C].

    Every sample takes the first of its own draws that is kept, so that the batch has no influence. The host reads which
    samples are without one after every block.
    """
    left = torch.arange(len(p), device=p.device)
    found = p.new_empty(len(p), channels, dtype=torch.float32)
    for block in count():
        tries = min(FEWEST << block - 1, MOST) if block else 1
        mine = Noise(noise.seed[left], noise.step[left])
        u = mine.fine(RETRY + block if block else Noise.BONUS, tries, channels + 2)
        y = GaussianMixture.of(p[left], channels).draw(u[..., 1:]).float()
        log_p, log_q = (GaussianMixture.of(law[left, None], channels).log_prob(y) for law in (p, q))
        # written so that a NaN, of weights that are broken, ends the loop
        kept = ~(refused[left, None] & (u[..., 0] >= -torch.expm1(log_q - log_p)))
        done, first = kept.any(1), kept.byte().argmax(1)
        found[left[done]] = y[done, first[done]]
        left = left[~done]
        if not len(left):
            break
    return found
