"""A tiny drafter's training as one of several processes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lanternpp.training.drafter import DrafterSettings, train
from lanternpp.training.hardware import pick
from lanternpp.training.material.samples import SelfSampling
from lanternpp.training.run import TrainingOptions


def learn(model: str, rank: int, size: int, port: int) -> None:
    """Four steps of batches of four, by process `rank` of `size`; errors are the exit status."""
    torch.set_num_threads(1)
    if size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    place = Path(model)
    options = TrainingOptions(place / "drafter", 4, checks=1, log_steps=2, device=pick("cpu"))
    settings = DrafterSettings(loss="guided", batch_size=4, warmup=2, noise=0.0)
    assert train(
        None, place, 1, settings, options, self_sampling=SelfSampling(place / "mine", 8, 4), follow=True
    )
