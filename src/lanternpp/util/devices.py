"""The devices and dtypes that their names, `auto` among them, stand for on this machine; free memory and cores."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import torch

from lanternpp.errors import InputError

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}
STORED = ("int8", "int4")  # dtypes of stored weights alone; their products have the dtype of auto
# Linux counts free memory here; control groups limit the memory and the cores of containers and services.
PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def pick_device(name: str = "auto") -> torch.device:
    """Return the device called `name`; auto: the first CUDA GPU, else the CPU. Raise InputError if this machine lacks it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"(cpu|cuda)(:(0|[1-9]\d{0,2}))?", name):
        raise InputError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device {name!r} is not on this machine, which has {torch.cuda.device_count()} CUDA GPUs"
        )
    return device


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or "cpu" and the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} {platform.machine()}"


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype called `name`; for auto and `STORED`: `half_width`, else float32. Raise InputError if `name` is unknown."""
    if name in ("auto", *STORED):
        return half_width(device) or torch.float32
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is unknown; use auto, {', '.join((*DTYPES, *STORED))}")
    return DTYPES[name]


def half_width(device: torch.device) -> torch.dtype | None:
    """Return the 16-bit dtype whose matrix products the device computes in hardware: on a GPU bfloat16 or, before Ampere,
    float16; on a CPU with AMX or AVX-512-BF16 bfloat16, else None.
    """
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if native else torch.float16
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    native = any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
    return torch.bfloat16 if native else None


@contextmanager
def own_devices() -> Iterator[None]:
    """Leave the caller's default device, so that tensors are on the devices that the code names."""
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        yield


@contextmanager
def inference() -> Iterator[None]:
    """Enter `torch.inference_mode` and leave the caller's `torch.autocast`, so that models compute in their own dtype."""
    with torch.inference_mode(), own_devices(), ExitStack() as stack:
        for device_type in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def check_memory(needed: int, device: torch.device, purpose: str) -> None:
    """Raise InputError if `purpose` needs more than the free bytes of a device."""
    free = free_memory(device)
    if free is not None and needed > free:
        raise InputError(
            f"{purpose} needs {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free on {device}: use a smaller batch size"
        )


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device; None if the system does not report them."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu":
        return None
    free = []
    with suppress(OSError):
        for line in (PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    for controllers, folder in _control_groups("memory"):
        *names, prefix = (
            ("limit_in_bytes", "usage_in_bytes", "total_") if controllers else ("max", "current", "")
        )
        with suppress(OSError, ValueError):  # the text "max" means no limit
            limit, usage = (int((folder / f"memory.{name}").read_text()) for name in names)
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # The kernel frees pages of files when a process needs memory.
            pages = sum(int(stat.get(f"{prefix}{state}_file", 0)) for state in ("active", "inactive"))
            free.append(limit - usage + pages)
    return min(free, default=None)


def usable_cores() -> int:
    """Return how many cores this process may use: those of its affinity, or fewer by a quota, as containers have."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for controllers, folder in _control_groups("cpu"):
        names = ("cfs_quota_us", "cfs_period_us") if controllers else ("max",)
        with suppress(OSError, ValueError):  # the text "max", or -1, means no quota
            quota, period = map(int, " ".join((folder / f"cpu.{name}").read_text() for name in names).split())
            cores = min(cores, quota / period) if quota > 0 else cores
    return max(1, math.ceil(cores))


def _control_groups(resource: str) -> Iterator[tuple[str, Path]]:
    """Yield the folders of this process's control groups, and the controllers of each: none in version 2 of control groups."""
    with suppress(OSError):
        for line in (PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or resource in controllers.split(","):
                root = GROUPS / (resource if controllers else "")
                yield from ((controllers, folder) for folder in {root, root / path.strip("/")})
