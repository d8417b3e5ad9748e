"""Free memory and usable cores, by the kernel and by control groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lanternpp.util import devices

MACHINE = {"proc/meminfo": "MemTotal: 20 kB\nMemAvailable:  9 kB\n"}
NONE = MACHINE | {"proc/self/cgroup": "0::/\n", "groups/memory.max": "max", "groups/memory.current": "5000"}
CONTAINER = NONE | {"groups/memory.max": "9000", "groups/memory.stat": "inactive_file 300\nactive_file 20\n"}
SERVICE = NONE | {
    "proc/self/cgroup": "0::/system.slice/mine.service\n",
    "groups/system.slice/mine.service/memory.max": "4000",
    "groups/system.slice/mine.service/memory.current": "1500",
    "groups/system.slice/mine.service/memory.stat": "anon 1500\n",
}
FIRST_VERSION = MACHINE | {
    "proc/self/cgroup": "2:cpu:/a\n1:memory:/outside\n0::/\n",
    "groups/memory/memory.limit_in_bytes": "9000",
    "groups/memory/memory.usage_in_bytes": "5000",
    "groups/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 200\n",
}
FAIR = {"groups/cpu.max": "max 100000\n", "groups/cpu/cpu.cfs_quota_us": "-1\n"}
QUOTA = {"groups/cpu.max": "150000 100000\n"}
FIRST_QUOTA = {"groups/cpu/a/cpu.cfs_quota_us": "300000\n", "groups/cpu/a/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "free", "cores"),
    [
        ({}, None, 8),
        (MACHINE | FAIR, 9216, 8),
        (NONE | FAIR, 9216, 8),
        (CONTAINER | QUOTA, 4320, 2),
        (SERVICE | {"groups/system.slice/mine.service/cpu.max": "20000 100000"}, 2500, 1),
        (FIRST_VERSION | FIRST_QUOTA, 4200, 3),
    ],
)
def test_memory_and_cores_of_machines_and_containers(files, free, cores, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8), raising=False)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(devices, "PROC", tmp_path / "proc")
    monkeypatch.setattr(devices, "GROUPS", tmp_path / "groups")
    assert devices.free_memory(torch.device("cpu")) == free and devices.usable_cores() == cores
