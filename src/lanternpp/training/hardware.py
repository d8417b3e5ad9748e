"""Which device to train on, and in which precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from lanternpp.training.team import team
from lanternpp.util.devices import half_width, pick_device


def pick(name: str) -> torch.device:
    """The device by name, set up for steps of one shape."""
    device = team().device(pick_device(name))
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    return device


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bfloat16 on devices that multiply it in hardware, float32 elsewhere; or as the launch of a team says."""
    launched = team().autocast()
    if launched is not None:
        return launched
    return (
        torch.autocast(device.type, dtype=torch.bfloat16)
        if half_width(device) is torch.bfloat16
        else nullcontext()
    )
