"""A connection to a Ray cluster, or a cluster on this machine alone, which listens on the loopback address only."""

from __future__ import annotations

import io
import logging
import os
import re
import secrets
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lanternpp.errors import InputError

LOCAL, AUTO = "local", "auto"
LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's name for: one machine, bound to 127.0.0.1
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",  # do not run its workers at a lower priority
}
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_raylet_start_wait_time_s": "180",
}
OTHERS = ("RAY_ADDRESS", "RAY_GCS_SERVER_PORT", "RAY_NAMESPACE")  # of a cluster that runs already
TOKEN = secrets.token_hex(32)  # which is needed to connect to the cluster of this process
TRIES = 3  # of starting a cluster
STORE = 256 * 2**20  # bytes of shared memory, through which pictures are sent


@dataclass(frozen=True)
class Share:
    """How many workers there are; the cores and GPUs of each, as options of a Ray task or actor; its threads of PyTorch."""

    workers: int
    options: dict[str, Any]
    threads: int


def check(address: str) -> None:
    """InputError unless Ray is installed and the address well-formed. Ray is not imported: that takes seconds."""
    if address not in (LOCAL, AUTO) and not re.fullmatch(r"[\w.-]+:\d+|\[[0-9a-fA-F:]+\]:\d+", address):
        raise InputError(
            f"--ray {address!r} is not an address; use local (this machine), auto (the cluster this machine is part "
            "of) or HOST:PORT"
        )
    if find_spec("ray") is None:
        raise InputError("--ray needs Ray, which is not installed; pip install 'lanternpp[ray]'")


@contextmanager
def cluster(address: str, workers: int | None = None) -> Iterator[Any]:
    """The module `ray`, connected. workers: a local cluster gets at least so many cores.

    Ray prints messages, such as the death of a worker, on stdout. So inside the block `sys.stdout` is discarded.
    Raises InputError where there is no cluster at the address.
    """
    check(address)
    os.environ.update({k: v for k, v in QUIET.items() if k not in os.environ})
    if address == LOCAL:
        os.environ.update(LOOPBACK, RAY_AUTH_TOKEN=TOKEN)
        for name in OTHERS:
            os.environ.pop(name, None)
    import ray

    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    with ExitStack() as ends:
        exit_on_sigterm()
        ends.enter_context(redirect_stdout(io.StringIO()))
        # Ray makes its folder readable for everybody, so it is put inside one that only this user can read.
        made = tempfile.TemporaryDirectory(prefix="lanternpp-", ignore_cleanup_errors=True)
        folder = str(Path(ends.enter_context(made), "ray"))
        ends.callback(ray.shutdown)
        if address == LOCAL:
            size = {"num_cpus": max(cores(), workers or 1), "object_store_memory": STORE}
            start(ray, folder, size | quiet)
        else:
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
                raise InputError(
                    f"--ray {address}: no Ray cluster answers there ({brief(error)}); start one with `ray start`, or "
                    f"use --ray {LOCAL}"
                ) from None
        exit_on_sigterm()  # Ray has replaced the handler
        yield ray


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit, with the status of a killed process, so that Ray is shut down."""

    def leave(sig: int, frame: object) -> None:
        raise SystemExit(128 + sig)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)


def start(ray: Any, folder: str, options: dict[str, Any]) -> None:
    """Start a cluster on this machine, with its files in a folder; tried several times, since on a busy machine its processes may not connect."""
    for attempt in range(1, TRIES + 1):
        try:
            ray.init(address=LOCAL, include_dashboard=False, _temp_dir=folder, **options)
            if not all(node["ObjectStoreSocketName"].startswith(folder) for node in ray.nodes()):
                raise RuntimeError("it found another cluster's parts")
            return
        except Exception as error:
            ray.shutdown()
            if attempt == TRIES:
                raise InputError(
                    f"--ray {LOCAL}: Ray does not start on this machine ({brief(error)}); leave --ray out to do "
                    "without it"
                ) from None


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share(ray: Any, address: str, workers: int | None, device: str) -> Share:
    """Share a cluster among workers. Raises InputError where it has too few cores.

    workers: None is one for each GPU; where there is none, one for every four cores.
    """
    import torch  # takes a second, and a wrong address is rejected sooner

    resources = ray.cluster_resources()
    cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0)) if device != "cpu" else 0
    count = workers or gpus or max(1, cpus // 4)
    if count > cpus:
        raise InputError(f"{count} workers are too many for the {cpus} cores of the cluster; ask for fewer")
    smallest = min(int(node["Resources"]["CPU"]) for node in ray.nodes() if node["Resources"].get("CPU"))
    each = max(1, min(cpus // count, smallest))
    threads = max(1, torch.get_num_threads() // count) if address == LOCAL else each
    return Share(count, {"num_cpus": each, "num_gpus": 1 / -(-count // gpus) if gpus else 0}, threads)


def brief(error: BaseException) -> str:
    """The last line of a long message, shortened to a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300].rstrip(".")
