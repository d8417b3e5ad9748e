"""Which device and which dtype `auto` means here."""

from __future__ import annotations

import platform

import torch

from lanternpp.errors import InputError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
INT8 = "int8"  # weights in 8 bits


def pick_device(name: str = "auto") -> torch.device:
    """A device by name; auto: the first CUDA GPU, else the CPU. Raises InputError where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device {name!r} is not on this machine, which has {torch.cuda.device_count()} CUDA GPUs"
        )
    return device


def device_name(device: torch.device) -> str:
    """What computes: the GPU's name, or the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} {platform.machine()}"


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """A dtype by name; auto: the half-width one that this device multiplies in, else float32.

    int8 is how weights are stored, not what they are multiplied in: for it, the dtype is that of auto.
    """
    if name in ("auto", INT8):
        return half_width(device) or torch.float32
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)} or {INT8}")
    return DTYPES[name]


def half_width(device: torch.device) -> torch.dtype | None:
    """The 16-bit dtype whose matrix products have hardware of their own: on a GPU bfloat16 or, before Ampere,
    float16; on a CPU bfloat16 with AMX or AVX-512-BF16. None where there is none.
    """
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    found = any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
    return torch.bfloat16 if found else None
