"""Random numbers as a function of a sample's seed, its step count, a purpose and an index (a counter-based generator).

There is no generator state, so that a picture does not depend on its batch, order or server. The function is an integer
hash: multiply and xor-shift on 32 bits, under 64 bits of key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

MAX_NUMBERS = 1 << 16  # numbers that are computed in advance in one operation
MAX_STEPS = 32  # steps whose numbers are computed in advance in one operation
# signed integers with the 32-bit patterns of these constants
_GOLDEN, _MIX_A, _MIX_B = (x - (x >> 31 << 32) for x in (0x9E3779B9, 0x7FEB352D, 0x846CA68B))


def _mix(x: Tensor) -> Tensor:
    """Map 32-bit patterns (int32, wrapping) one to one, so that each bit of x affects all bits of the result."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MIX_A
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _MIX_B
    return x ^ ((x >> 16) & 0xFFFF)


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of B samples at their present steps."""

    seed: Tensor  # [B] int64
    step: Tensor  # [B] int64
    numbers: Tensor | None = None
    """[B, purposes, count] float64: the first numbers of `fine` of ACCEPT, BONUS, DRAFT, DRAFT + 1 .., if computed in advance."""

    ACCEPT: ClassVar[int] = 1
    BONUS: ClassVar[int] = 2
    DRAFT: ClassVar[int] = 16  # + the level of the tree

    def uniform(self, purpose: int, *shape: int) -> Tensor:
        """Return uniform float32 in (0, 1), [B, *shape]."""
        purposes = torch.full((1,), purpose, device=self.seed.device)
        return self._uniform(purposes, math.prod(shape)).view(len(self.seed), *shape)

    def fine(self, purpose: int, *shape: int) -> Tensor:
        """Return uniform float64 in (0, 1) of 46 random bits, [B, *shape]: for draws from many improbable codes."""
        count = math.prod(shape)
        if self.numbers is not None and (purpose <= self.BONUS or purpose >= self.DRAFT):
            index = purpose - self.ACCEPT if purpose <= self.BONUS else purpose - self.DRAFT + 2
            if index < self.numbers.shape[1] and count <= self.numbers.shape[2]:
                return self.numbers[:, index, :count].view(len(self.seed), *shape)
        return _joined(self.uniform(purpose, *shape, 2))

    def draft_uniform(self, levels: int) -> Tensor:
        """Return the first number of `fine` of every level of a draft, [B, levels]."""
        if self.numbers is not None and self.numbers.shape[1] >= 2 + levels:
            return self.numbers[:, 2 : 2 + levels, 0]
        return torch.cat([self.fine(self.DRAFT + level, 1) for level in range(levels)], 1)

    def precomputed(self, levels: int, max_count: int = 64) -> list[Noise]:
        """Return this noise at its present step and at later steps, in order, all numbers computed in one operation.

        Each holds up to `max_count` numbers of every purpose up to a draft's last level. Launching an operation takes longer
        than computing a small batch's numbers. For a larger batch fewer steps are computed, for a large batch only this noise
        is returned, without numbers.
        """
        index = torch.arange(2 + levels, device=self.seed.device)
        purpose = (index + self.ACCEPT).where(index < 2, index - 2 + self.DRAFT)  # [P]
        count = min(max_count, MAX_NUMBERS // (len(self.seed) * len(purpose)))
        if not count:
            return [self]
        num_steps = min(MAX_STEPS, MAX_NUMBERS // (len(self.seed) * len(purpose) * count))
        step = self.step[:, None] + torch.arange(num_steps, device=self.seed.device)  # [B, steps]
        all_steps = Noise(self.seed[:, None].expand_as(step).flatten(), step.flatten())
        pairs = all_steps._uniform(purpose, 2 * count).view(-1, num_steps, len(purpose), count, 2)
        return [Noise(self.seed, self.step, numbers) for numbers in _joined(pairs).unbind(1)]

    def _uniform(self, purpose: Tensor, count: int) -> Tensor:
        """Return uniform float32 in (0, 1) of purposes [P], [B, P, count]."""
        seed, step, purpose = self.seed[:, None], self.step[:, None].to(torch.int32), purpose.to(torch.int32)
        low, high = seed.to(torch.int32), (seed >> 32).to(torch.int32)
        seed_hash = _mix(low + (purpose + 1) * _GOLDEN)
        step_hash = _mix(step + (purpose + 1) * _MIX_A)
        # Two keys per sample and purpose, [B, P] each.
        low, high = _mix(seed_hash ^ _mix(step + high * _MIX_A)), _mix(step_hash ^ _mix(high + low * _MIX_B))
        index = torch.arange(count, dtype=torch.int32, device=self.seed.device) * _GOLDEN
        bits = _mix((index + low[..., None]) ^ high[..., None])
        return (((bits >> 9) & 0x7FFFFF).float() + 0.5).mul_(2.0**-23)


def _joined(pairs: Tensor) -> Tensor:
    """Join pairs of uniform float32 [..., 2] to float64 [...] of twice the random bits."""
    high, low = pairs.double().unbind(-1)
    return high + (low - 0.5) * 2.0**-23
