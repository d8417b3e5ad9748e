"""The cost of relaxing: the total variation between p and `output_distribution`, the distribution of the code decided."""

from __future__ import annotations

import torch
from torch import Tensor

from lanternpp.accept.base import Acceptance

ENUMERATED = 1024  # codes up to which the cost of a rule without an `accept_mass` is computed code by code
SAMPLED = 64  # codes that are sampled where there are more


def tv_cost(rule: Acceptance, p: Tensor, q: Tensor) -> Tensor:
    """The total variation between p and `output_distribution` for one child drawn from q, [...]; p and q [..., V].

    With the optimal residual it is `excess`, the least possible for the same acceptance. Of a rule that defines neither
    `accept_mass` nor `output_distribution`, over more than `ENUMERATED` codes, it is an estimate of that least with either residual: the exact
    value would call `relax_with_draft` for each of V codes.
    """
    if rule.lossless:
        return torch.zeros_like(p[..., 0])
    if type(rule).output_distribution is Acceptance.output_distribution:
        if type(rule).accept_mass is Acceptance.accept_mass and p.shape[-1] > ENUMERATED:
            return _sampled(rule, p, q)
        if rule.optimal_residual or rule.paper_residual_is_optimal:
            return excess(rule, p, q)
    return (rule.output_distribution(p, q) - p).abs_().sum(-1) / 2


def excess(rule: Acceptance, p: Tensor, q: Tensor) -> Tensor:
    """The accepted mass above p, sum [a - p]+ with a = min(q, accept_mass), [...]; p and q [..., V]."""
    if type(rule).relax_with_draft is Acceptance.relax_with_draft:
        mass = rule.accept_mass(p, q.where(q > p, 0))  # where q <= p there is no excess
    else:
        mass = rule.accept_mass(p, q)
    return (torch.minimum(q, mass) - p).clamp_(min=0).sum(-1)


def _sampled(rule: Acceptance, p: Tensor, q: Tensor) -> Tensor:
    """`excess` from `SAMPLED` codes, spread evenly over the mass [q - p]+, its upper bound, [B].

    A code y contributes a share [min(q, accept_mass) - p]+ / [q - p]+ of its mass (stratified sampling at fixed
    points), and the mean has at most 0.5 / sqrt(SAMPLED) of the mass as its error.
    """
    most = (q - p).clamp(min=0)
    total = most.cumsum(-1, dtype=torch.float64)
    places = (torch.arange(SAMPLED, device=p.device) + 0.5) / SAMPLED
    codes = torch.searchsorted(total, (places * total[:, -1:]).contiguous(), right=True)
    codes = codes.clamp_(max=p.shape[-1] - 1).T  # [m, B]
    shape = SAMPLED, -1, -1
    mass = (
        rule.relax_with_draft(p.expand(shape), q.expand(shape), codes).gather(-1, codes[..., None])[..., 0].T
    )
    at = codes.T
    let_out = torch.minimum(q.gather(1, at), mass) - p.gather(1, at)
    share = let_out.clamp_(min=0) / most.gather(1, at).clamp_(min=torch.finfo(p.dtype).tiny)
    return share.mean(1) * total[:, -1].to(p.dtype)
