"""What all tests share: one thread, and the `gpu` marker, skipped where there is no CUDA GPU and nowhere else."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.models import write_model

from lanternpp import Pipeline

gc.disable()  # until all tests are collected, as imported objects stay
torch.set_num_threads(1)  # the tests' tensors are small: a second thread makes them ten times slower
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
os.environ["LANTERNPP_FIT"] = "0"  # drafts would depend on this machine and on earlier calls


def pytest_addoption(parser: pytest.Parser) -> None:
    """How often tests/training/test_kills.py kills each of its commands, and how many pictures tests/test_distribution.py draws."""
    parser.addoption("--kills", type=int, default=2, help="kills of each command that must survive them")
    parser.addoption(
        "--pictures", type=int, default=500, help="pictures of each method beside plain decoding"
    )


# Files whose tests mostly wait for processes that they start: they run first, beside tests that compute.
FIRST = {
    "test_release.py",
    "test_ray.py",
    "test_ray_serve.py",
    "test_workers.py",
    "test_hub.py",
    "test_published.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first, and skip GPU tests on a machine without a GPU."""
    items.sort(key=lambda item: item.path.name not in FIRST)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU on this machine"))


def pytest_collection_finish() -> None:
    """Collect garbage from now on, less often, and only among new objects: half a million exist already."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """`torch.set_num_threads`, until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def without_gradients() -> Iterator[None]:
    """Inference mode, as in the engine."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder, in which no test writes."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def pipe(model: Path) -> Pipeline:
    """The tiny model, in float32."""
    return Pipeline.from_pretrained(model, device="cpu", dtype="float32", tuned=False)
