"""Codes <-> pixels."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from lanternpp.errors import InputError
from lanternpp.nn import checkpoints
from lanternpp.vq.model import VQ, VQConfig


def load(folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> VQ:
    """The tokenizer of a model folder, ready to encode and decode. The codebook stays float32 in any `dtype`."""
    folder = Path(folder)
    config, tensors = checkpoints.load(folder)
    if config.get("kind") != "vq":
        raise InputError(f"{folder} holds a {config.get('kind')!r}, where a tokenizer of kind 'vq' is expected.")
    known = {field.name for field in fields(VQConfig)}
    vq = VQ(VQConfig(**{name: value for name, value in config.items() if name in known}))
    tensors.setdefault("quantiser.sums", vq.quantiser.sums)
    tensors.setdefault("quantiser.counts", vq.quantiser.counts)
    checkpoints.fill(vq, tensors, folder / checkpoints.WEIGHTS)
    vq.encoder.to(dtype=dtype)
    vq.decoder.to(dtype=dtype)
    return vq.to(device=device, memory_format=torch.channels_last).eval().requires_grad_(False)


__all__ = ["VQ", "VQConfig", "load"]
