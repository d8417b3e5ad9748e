"""Random numbers as a function: of a sample's seed, its own turn, a purpose and an index.

Nothing is drawn from a stateful generator, so a picture does not depend on which batch, order or
server it was made in. The function is an integer hash: multiply and xor-shift on 32 bits, under 64 bits of key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

_GOLDEN, _MIX_A, _MIX_B = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


def _signed(value: int) -> int:
    """A 32-bit pattern as the signed integer that holds it."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit patterns (int32, wrapping) that spreads every bit over all others."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _signed(_MIX_A)
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(_MIX_B)
    return x ^ ((x >> 16) & 0xFFFF)


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of B samples at their present turns."""

    seed: Tensor  # [B] int64
    turn: Tensor  # [B] int64

    ACCEPT: ClassVar[int] = 1
    BONUS: ClassVar[int] = 2
    DRAFT: ClassVar[int] = 16  # + the level of the tree

    def uniform(self, purpose: int, *shape: int) -> Tensor:
        """Uniform float32 in (0, 1), [B, *shape]."""
        low, high = self._keys(purpose)
        count = 1
        for n in shape:
            count *= n
        index = torch.arange(count, dtype=torch.int32, device=self.seed.device) * _signed(_GOLDEN)
        bits = _mix((index + low[:, None]) ^ high[:, None])
        return (((bits >> 9) & 0x7FFFFF).float() + 0.5).mul_(2.0**-23).view(len(self.seed), *shape)

    def fine(self, purpose: int, *shape: int) -> Tensor:
        """Uniform float64 in (0, 1) of 46 random bits, [B, *shape]: for draws from many improbable codes."""
        coarse, rest = self.uniform(purpose, 2, *shape).double().unbind(1)
        return coarse + (rest - 0.5) * 2.0**-23

    def exponential(self, purpose: int, *shape: int) -> Tensor:
        """Exponential float32 of mean 1, [B, *shape]; argmax(p / e) is a draw from p."""
        return self.uniform(purpose, *shape).log_().neg_()

    def _keys(self, purpose: int) -> tuple[Tensor, Tensor]:
        """Two 32-bit keys per sample, [B] each."""
        low, high, turn = (
            self.seed.to(torch.int32),
            (self.seed >> 32).to(torch.int32),
            self.turn.to(torch.int32),
        )
        first = _mix(low + _signed(_GOLDEN * (purpose + 1)))
        first = _mix(first ^ _mix(turn + high * _signed(_MIX_A)))
        second = _mix(turn + _signed(_MIX_A * (purpose + 1)))
        return first, _mix(second ^ _mix(high + low * _signed(_MIX_B)))
