"""A tiny drafter's training as one of several processes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lanternpp.training.drafter import train
from lanternpp.training.eagle import EagleTask
from lanternpp.training.options import DrafterSettings, TrainingData, TrainingOptions


def learn(model: str, rank: int, size: int, port: int) -> None:
    """Four steps of batches of four, by process `rank` of `size`; errors are the exit status."""
    torch.set_num_threads(1)
    if size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    place = Path(model)
    options = TrainingOptions(place / "drafter", 4, checks=1, log_steps=2, device="cpu")
    settings = DrafterSettings(loss="guided", batch_size=4, warmup=2, noise=0.0).of("eagle")
    own = TrainingData(own=True, prompts=place / "mine", samples=8, sample_batch=4)
    assert train(place, EagleTask, settings, own, options)
