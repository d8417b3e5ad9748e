"""A tokenizer from its folder."""

from __future__ import annotations

from pathlib import Path

import torch

from lanternpp.nn import checkpoints
from lanternpp.nn.configs import config_as
from lanternpp.vq.model import VQ, VQConfig


def read_vq(folder: Path, dtype: torch.dtype = torch.float32) -> VQ:
    """The tokenizer in `folder`, on the CPU; its convolutions in `dtype`, its codebook in float32."""
    vq = VQ(config_as(VQConfig, checkpoints.load_config(folder), folder))
    path = folder / checkpoints.WEIGHTS
    tensors = {**moving(vq), **checkpoints.read_safetensors(path)}
    checkpoints.fill(vq, tensors, path)
    vq.encoder.to(dtype)
    vq.decoder.to(dtype)
    return vq.eval().requires_grad_(False)


def moving(vq: VQ) -> dict[str, torch.Tensor]:
    """The training statistics that a model folder does not hold."""
    kept = vq.weights()
    return {name: tensor for name, tensor in vq.state_dict().items() if name not in kept}
