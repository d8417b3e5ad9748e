"""Losses of a drafter on its distributions beside the target's, each a function of logits."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cross_entropy(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Mean nats of `logits` [..., V] under the distribution of `target_logits` [..., V]."""
    return -(target_logits.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1).mean()


def acceptance(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Chance that a draft from `logits` [..., V] is kept by a target of `target_logits` [..., V]: sum min(p, q)."""
    return torch.minimum(logits.float().softmax(-1), target_logits.float().softmax(-1)).sum(-1)


def cross_entropy_and_lk(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Soft cross-entropy and the LK loss together."""
    return soft_cross_entropy(logits, target_logits) + lk_loss(logits, target_logits)


def lk_loss(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Mean of -log acceptance (the LK loss)."""
    return -acceptance(logits, target_logits).log().mean()
