"""A tokenizer from its folder."""

from __future__ import annotations

from pathlib import Path

import torch

from lanternpp.nn import checkpoints
from lanternpp.nn.configs import config_as
from lanternpp.nn.sources import SAME, Source, blank
from lanternpp.vq.model import MOVING, VQ, VQConfig


def read_vq(folder: Path, dtype: torch.dtype = torch.float32) -> VQ:
    """The tokenizer in `folder`, on the CPU; its convolutions in `dtype`, its codebook in float32."""
    config = config_as(VQConfig, checkpoints.load_config(folder), folder)
    with blank(folder):
        vq = VQ(config)
    Source.open(folder / checkpoints.WEIGHTS).fill(vq, [SAME], dtype, lacking=MOVING)
    vq.quantiser.restart()
    return vq.eval().requires_grad_(False)
