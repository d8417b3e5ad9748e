"""Rotary position embeddings (RoFormer, arXiv 2104.09864), as tables of cosines and sines.

Every family rotates channel i with channel i + d / 2 of a head. Checkpoints that pair neighbouring channels are permuted
when they are read.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grid_table(prefix: int, grid: int, head_dim: int, base: float = 10000.0) -> Tensor:
    """2-D table over a grid of codes, [prefix + grid * grid, 2, head_dim], for `rotate`.

    The first half of the frequencies encodes the row, the second the column. Prefix slots have angle 0, which is no
    rotation. On the CPU, as `line_table`.
    """
    quarter = head_dim // 4
    freq = base ** -(torch.arange(quarter, dtype=torch.float64, device="cpu") / quarter)
    line = torch.arange(grid, dtype=torch.float64, device="cpu")[:, None] * freq  # [grid, quarter]
    row = line[:, None].expand(grid, grid, quarter)
    column = line[None].expand(grid, grid, quarter)
    angle = torch.cat((row, column), -1).reshape(grid * grid, 2 * quarter)
    angle = torch.cat((torch.zeros(prefix, 2 * quarter, dtype=torch.float64, device="cpu"), angle))
    return angle_table(angle)


def line_table(positions: int, head_dim: int, base: float = 10000.0) -> Tensor:
    """1-D table, [positions, 2, head_dim], for `rotate` (RoFormer, arXiv 2104.09864, section 3.2.2).

    On the CPU, whatever the default device: a module that is made on the meta device keeps its table.
    """
    half = head_dim // 2
    freq = base ** -(torch.arange(half, dtype=torch.float64, device="cpu") / half)
    return angle_table(torch.arange(positions, dtype=torch.float64, device="cpu")[:, None] * freq)


def angle_table(angle: Tensor) -> Tensor:
    """Angles [positions, head_dim / 2] -> cosines and signed sines for `rotate`, [positions, 2, head_dim]."""
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """x [R, N, H, d] rotated by rows [R, N, 2, 1, d] of a table -> the same shape."""
    if torch.compiler.is_compiling():  # the gradient of `roll` is compiled to slow code on a CPU
        half = x.shape[-1] // 2
        first, second = x.chunk(2, -1)
        cos, sin = rotation[:, :, 0, :, :half], rotation[:, :, 1, :, half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.addcmul(x * rotation[:, :, 0], x.roll(x.shape[-1] // 2, -1), rotation[:, :, 1])
