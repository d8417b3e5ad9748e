"""A connection to a Ray cluster, or a cluster on this machine alone, which listens on the loopback address only."""

from __future__ import annotations

import io
import logging
import math
import os
import re
import secrets
import signal
import sys
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
LOOPBACK_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's name for: one machine, bound to 127.0.0.1
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",  # workers run at the priority of this process
}
QUIET_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_raylet_start_wait_time_s": "180",
}
OTHER_CLUSTER = ("RAY_ADDRESS", "RAY_GCS_SERVER_PORT", "RAY_NAMESPACE")  # variables of a running cluster
TOKEN = secrets.token_hex(32)  # which is needed to connect to the cluster of this process
MAX_STARTS = 3  # attempts to start a cluster
STORE_BYTES = 256 * 2**20  # of shared memory, through which pictures are sent


@dataclass(frozen=True)
class Share:
    """The number of workers, and the resources of each."""

    workers: int
    options: dict[str, Any]  # cores and GPUs of a worker, as options of a Ray task or actor
    threads: int  # of PyTorch in a worker


def check(address: str) -> None:
    """Raise InputError unless Ray is installed and the address well-formed. Ray is not imported, which would take seconds."""
    if address not in (LOCAL, AUTO) and not re.fullmatch(r"[\w.-]+:\d+|\[[0-9a-fA-F:]+\]:\d+", address):
        raise InputError(
            f"--ray {address!r} is not an address; use local (this machine), auto (the cluster this machine is part "
            "of) or HOST:PORT"
        )
    if find_spec("ray") is None:
        raise InputError("--ray needs Ray, which is not installed; pip install 'lanternpp[ray]'")


@contextmanager
def cluster(address: str, workers: int | None = None) -> Iterator[Any]:
    """Connect to a cluster, and yield the module `ray`. workers: a local cluster gets at least this number of cores.

    Ray prints messages, such as the death of a worker, on stdout. So inside the block `sys.stdout` is discarded.
    Raises InputError where there is no cluster at the address.
    """
    check(address)
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if address == LOCAL:
        os.environ.update(LOOPBACK_ENVIRONMENT, RAY_AUTH_TOKEN=TOKEN)
        for name in OTHER_CLUSTER:
            os.environ.pop(name, None)
    import ray

    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    with ExitStack() as stack:
        exit_on_sigterm()
        stack.enter_context(redirect_stdout(io.StringIO()))
        # Ray makes its folder readable for everybody, so it is put inside a folder that only this user can read.
        private = tempfile.TemporaryDirectory(prefix="lanternpp-", ignore_cleanup_errors=True)
        folder = str(Path(stack.enter_context(private), "ray"))
        stack.callback(ray.shutdown)
        if address == LOCAL:
            from lanternpp.util.devices import usable_cores  # here, since it imports torch

            options |= {"num_cpus": max(usable_cores(), workers or 1), "object_store_memory": STORE_BYTES}
            start(ray, folder, options)
        else:
            try:
                ray.init(address=address, **options)
            except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
                raise InputError(
                    f"--ray {address}: no Ray cluster answers there ({brief(error)}); start one with `ray start`, or "
                    f"use --ray {LOCAL}"
                ) from None
        exit_on_sigterm()  # Ray has replaced the handler
        yield ray


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit, with the status of a killed process, so that Ray is shut down."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def start(ray: Any, folder: str, options: dict[str, Any]) -> None:
    """Start a cluster on this machine, with its files in a folder; try again where its processes connect too slowly."""
    for attempt in range(1, MAX_STARTS + 1):
        try:
            ray.init(address=LOCAL, include_dashboard=False, _temp_dir=folder, **options)
            if not all(node["ObjectStoreSocketName"].startswith(folder) for node in ray.nodes()):
                raise RuntimeError("it found another cluster's parts")
            return
        except Exception as error:
            ray.shutdown()
            if attempt == MAX_STARTS:
                raise InputError(
                    f"--ray {LOCAL}: Ray does not start on this machine ({brief(error)}); leave --ray out to do "
                    "without it"
                ) from None


def share(ray: Any, address: str, workers: int | None, device: str) -> Share:
    """Share a cluster among workers. Raises InputError where the cluster has too few cores.

    workers: None is a worker for each GPU; where there is no GPU, a worker for every four cores.
    """
    import torch  # here, since it takes a second, and a wrong address is rejected sooner

    resources = ray.cluster_resources()
    cpus = int(resources.get("CPU", 0))
    gpus = int(resources.get("GPU", 0)) if device != "cpu" else 0
    count = workers or gpus or max(1, cpus // 4)
    if count > cpus:
        raise InputError(f"{count} workers are too many for the {cpus} cores of the cluster; ask for fewer")
    smallest = min(int(node["Resources"]["CPU"]) for node in ray.nodes() if node["Resources"].get("CPU"))
    # A worker runs on one node, and on a whole GPU or on a part of one.
    worker_cpus = max(1, min(cpus // count, smallest))
    worker_gpus = 1 / math.ceil(count / gpus) if gpus else 0
    threads = max(1, min(torch.get_num_threads(), cpus) // count) if address == LOCAL else worker_cpus
    return Share(count, {"num_cpus": worker_cpus, "num_gpus": worker_gpus}, threads)


def brief(error: BaseException) -> str:
    """Return the last line of a long message, shortened to a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300].rstrip(".")
