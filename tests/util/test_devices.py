"""Free memory, by the kernel and by control groups."""

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


@pytest.mark.parametrize(
    ("files", "free"),
    [({}, None), (MACHINE, 9216), (NONE, 9216), (CONTAINER, 4320), (SERVICE, 2500), (FIRST_VERSION, 4200)],
)
def test_free_memory_of_machines_and_containers(files, free, tmp_path: Path, monkeypatch):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(devices, "PROC", tmp_path / "proc")
    monkeypatch.setattr(devices, "GROUPS", tmp_path / "groups")
    assert devices.free_memory(torch.device("cpu")) == free
