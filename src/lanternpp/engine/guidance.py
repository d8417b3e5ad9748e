"""Classifier-free guidance: the one place where samples B become rows R and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.models.base import Target

MOST = 1e6  # above it guided logits may overflow float32


@dataclass(frozen=True)
class Guidance:
    """Scale 1 is the conditional model alone, in one row per sample; above it every sample has two."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.scale <= MOST:
            raise InputError(f"cfg {self.scale} is out of range; use 1 (no guidance) to {MOST:g}")

    @property
    def branches(self) -> int:
        """Rows per sample."""
        return 1 if self.scale == 1 else 2

    def rows(self, x: Tensor) -> Tensor:
        """[B, ...] -> [R, ...]; conditional rows first."""
        return x if self.branches == 1 else torch.cat((x, x))

    def logits(self, model: Target, features: Tensor) -> Tensor:
        """Features [R, N, D] -> the guided logits of a model's head, [B, N, V]."""
        native = model.native_head
        found = None if native is None else native(features, self.scale, self.branches)
        return self.merge(model.head(features)) if found is None else found

    def merge(self, logits: Tensor) -> Tensor:
        """[R, ..., V] -> [B, ..., V] in float32 (float64 stays), before temperature."""
        logits = logits if logits.element_size() == 8 else logits.float()
        if self.branches == 1:
            return logits
        conditional, unconditional = logits.chunk(2)
        return unconditional.lerp(conditional, self.scale)
