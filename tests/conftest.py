"""What all tests share: one thread, and the `gpu` marker, skipped where there is no CUDA GPU and nowhere else."""

from __future__ import annotations

import os

import pytest
import torch

torch.set_num_threads(1)  # the tests' tensors are small: a second thread makes them ten times slower
os.environ["LANTERNPP_FIT"] = "0"  # drafts would depend on this machine and on what was drawn before


def pytest_addoption(parser: pytest.Parser) -> None:
    """How often tests/training/test_kills.py kills each of its commands, and how many pictures tests/test_distribution.py draws."""
    parser.addoption("--kills", type=int, default=3, help="kills of each command that must survive them")
    parser.addoption(
        "--pictures", type=int, default=500, help="pictures of each method beside plain decoding"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests on a machine without one."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU on this machine"))
