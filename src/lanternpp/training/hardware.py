"""Which device to train on, and in which precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from lanternpp.errors import InputError


def pick(device: str) -> torch.device:
    """`auto` (CUDA where there is one, else the CPU) or a device's name."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InputError(f"device {device!r} is unknown: use auto, cpu, cuda or cuda:N.") from None
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(f"device {device!r} is not there: this torch sees no CUDA GPU; use --device cpu.")
        if (chosen.index or 0) >= torch.cuda.device_count():
            raise InputError(f"device {device!r} is not there: this machine has {torch.cuda.device_count()} GPUs.")
        torch.backends.cudnn.benchmark = True
    return chosen


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bfloat16 on CUDA and on CPUs that multiply it in hardware (AMX); float32 elsewhere."""
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    if device.type == "cuda" or (device.type == "cpu" and amx()):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
