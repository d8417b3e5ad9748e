"""Block verification of a chain (arXiv 2403.10444): how many guesses are kept is decided jointly, from all their ratios.

The walk from the root (`verify`) ends at the first guess that is refused. Here a ratio p / q above 1 at one guess can
make up for a ratio below 1 at another, before it or behind it. With p_i the target's distribution
at level i, q_i the drafter's and x_i the guess:

    w_0 = 1;  w_i = min(w_{i-1} p_i(x_i) / q_i(x_i), 1)
    R_i(y) = [w_i p_{i+1}(y) - q_{i+1}(y)]+ ,  Z_i = sum R_i;  behind the last guess q is 0
    h_0 = 1;  h_i = Z_i / (Z_i + 1 - w_i)
    the guesses up to the last i are kept for which an event of probability h_i comes true; then a code ~ R_i

The output follows p, and no other rule for a single path keeps more of it. A guess x_i is kept with probability w_i,
however many guesses stand behind it, so a draft decides 1 + sum E[w_i] codes.

It holds for guesses that each follow a q_i that no later guess had a part in. A relaxed rule
replaces p by the law that it has for a single guess (`Acceptance.output_distribution`), and the output follows that law exactly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify import verdict_of
from lanternpp.types import Draft, Verdict, on_host


def verify_block(
    draft: Draft,
    logits: Tensor,
    sampling: Sampling,
    rule: Acceptance,
    noise: Noise,
    measure_tv: bool = False,
) -> Verdict:
    """A chain of N nodes, each guess drawn from `draft.probs`, and the target's logits [B, N, V] -> the verdict.

    The temperature must be above 0. measure_tv: also the exact total variation between p and the rule's output law at every
    kept node. Two random numbers are drawn per pass, and nothing is transferred to the host.
    """
    assert draft.probs is not None
    p, there = sampling.probs(logits), draft.tree.children[..., :1] >= 0
    q, law = draft.probs * there, p
    if not rule.lossless:
        law = rule.output_distributions(p, permitted(q, logits), draft.tree.depth, p.shape[1] - 1)
    behind, left = stops(law, q, draft.codes)
    last = (noise.fine(Noise.ACCEPT, 1) >= behind).sum(1)
    batch = torch.arange(len(last), device=last.device)
    weights = left[batch, last]
    bonus = sampling.draw(weights.where(weights.sum(-1, keepdim=True) > 0, law[batch, last]), noise)
    path = torch.arange(p.shape[1], device=p.device).minimum(last[:, None])
    cost = (law - p).abs_().sum(-1) / 2 if measure_tv else None
    return verdict_of(draft, path, last + 1, bonus, cost, law)


def permitted(q: Tensor, logits: Tensor) -> Tensor:
    """q without the codes that the format forbids, which are never relaxed; q and the target's logits [B, N, V]."""
    forbidden = float("-inf")
    if on_host(logits) and logits.amin() > forbidden:
        return q
    return q.where(logits > forbidden, 0)


def stops(p: Tensor, q: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Where a chain of g guesses behind its root ends, and the weights of the code drawn there.

    p, q [B, g + 1, V], q 0 behind the last guess; codes [B, g + 1] -> the probability [B, g] that fewer than
    1, 2 .. g guesses are kept, and the weights R [B, g + 1, V] of the code behind the root and behind each guess.
    """
    weight = weights(p, q, codes)
    left = (p * weight[..., None].to(p.dtype)).sub_(q).clamp_(min=0)
    mass = left.sum(-1).double()
    either = mass + 1 - weight
    return all_refused((mass / either).where(either > 0, 1)), left


def chain_weights(ratio: Tensor) -> Tensor:
    """Ratios p / q [B, g] of the guesses of chains -> w_0, 1, and w_1 .. w_g, [B, g + 1] float64."""
    total = F.pad(ratio.double().log().cumsum(1), (1, 0))
    return (total - total.cummax(1).values).exp()


def weights(p: Tensor, q: Tensor, codes: Tensor) -> Tensor:
    """w [B, g + 1] of the root and of each guess; arguments as of `stops`."""
    at = codes[:, 1:, None]
    chance = q[:, :-1].gather(-1, at)[..., 0]
    ratio = p[:, :-1].gather(-1, at)[..., 0] / chance
    return chain_weights(ratio.where(chance > 0, 0))


def rejected_distribution(p: Tensor, q: Tensor, codes: Tensor) -> Tensor:
    """The distributions [B, g, V] that the guesses follow which are not kept; arguments as of `stops`.

    Let i be behind the last guess that is kept. x_i was drawn from q_i, and would have been kept, itself or one behind
    it, with probability w_i = min(w_{i-1} p_i(x_i) / q_i(x_i), 1). So given that it was not, and given the guesses before it, x_i
    follows q_i (1 - w_i), normalised, which is [q_i - w_{i-1} p_i]+.
    """
    weight = weights(p, q, codes)[:, :-1, None].to(p.dtype)
    left = torch.addcmul(q[:, :-1], p[:, :-1], weight, value=-1).clamp_(min=0)
    mass = left.sum(-1, keepdim=True)
    return (left / mass).where(mass > 0, q[:, :-1])


def all_refused(halt: Tensor) -> Tensor:
    """halt [B, M], the probability of each of M events -> [B, M - 1], that from the 1st, 2nd .. on none comes true."""
    return (1 - halt[:, 1:]).flip(1).cumprod(1).flip(1)
