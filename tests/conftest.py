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

gc.disable()  # until all tests are collected: what is imported stays
torch.set_num_threads(1)  # the tests' tensors are small: a second thread makes them ten times slower
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
os.environ["LANTERNPP_FIT"] = "0"  # drafts would depend on this machine and on what was drawn before


def pytest_addoption(parser: pytest.Parser) -> None:
    """How often tests/training/test_kills.py kills each of its commands, and how many pictures tests/test_distribution.py draws."""
    parser.addoption("--kills", type=int, default=2, help="kills of each command that must survive them")
    parser.addoption(
        "--pictures", type=int, default=500, help="pictures of each method beside plain decoding"
    )


# Files whose tests mostly wait for processes that they start: they begin first, beside tests that compute.
FIRST = {
    "test_release.py",
    "test_ray.py",
    "test_ray_serve.py",
    "test_workers.py",
    "test_hub.py",
    "test_published.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long, and skip GPU tests on a machine without one."""
    items.sort(key=lambda item: item.path.name not in FIRST)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU on this machine"))


def pytest_collection_finish() -> None:
    """From now on garbage is looked for among what tests make, and less often: half a million objects are there already."""
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
    """As the engine calls its parts."""
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
