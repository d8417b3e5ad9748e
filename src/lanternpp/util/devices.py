"""Which device and which dtype `auto` means here."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from lanternpp.errors import InputError

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}
INT8 = "int8"  # weights in 8 bits
# Linux's counts of free memory; control groups limit containers and services.
PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def pick_device(name: str = "auto") -> torch.device:
    """A device by name; auto: the first CUDA GPU, else the CPU. Raises InputError where there is none."""
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
    """The name of a device: the GPU's name, or the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} {platform.machine()}"


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """A dtype by name; auto: the half-width one that this device multiplies in, else float32.

    int8 is a dtype of stored weights, not of their products: these have the dtype of auto.
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


@contextmanager
def inference() -> Iterator[None]:
    """`torch.inference_mode` in which models compute in their own dtype, also where the caller is within `torch.autocast`."""
    with torch.inference_mode(), ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def check_memory(needed: int, device: torch.device, what: str) -> None:
    """InputError where `what` needs more bytes than are free on a device."""
    free = free_memory(device)
    if free is not None and needed > free:
        raise InputError(
            f"{what} needs {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free on {device}: use a smaller batch size"
        )


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None where the system does not say."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return min(_free_of_machine(), default=None) if device.type == "cpu" else None


def _free_of_machine() -> Iterator[int]:
    """Free bytes by the kernel's count, and by the counts of the control groups of this process (versions 1 and 2)."""
    try:
        for line in (PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024
        groups = [line.split(":", 2)[1:] for line in (PROC / "self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for kind, path in groups:
        for folder in {GROUPS / kind, GROUPS / kind / path.strip("/")} if kind in ("", "memory") else ():
            names = ("limit_in_bytes", "usage_in_bytes") if kind else ("max", "current")
            try:
                limit, used = (int((folder / f"memory.{name}").read_text()) for name in names)
                facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no limit is "max"
                continue
            total = "total_" * bool(kind)
            files = sum(int(facts.get(f"{total}{state}_file", 0)) for state in ("active", "inactive"))
            yield limit - used + files  # pages of files are given up for others
