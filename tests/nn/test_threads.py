"""Threads are given up while other work takes the cores, and taken again when it ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lanternpp.nn import threads
from lanternpp.nn.threads import FittedThreads

IN_C, IN_PYTORCH = SimpleNamespace(native=object()), SimpleNamespace(native=None)
Run = Callable[[float, float], None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A function after which the thread has run for so many seconds more, and waited for so many; it has four threads."""
    monkeypatch.setattr(threads, "WAITS", tmp_path / "schedstat")
    monkeypatch.setattr(threads, "INTERVAL", 0.0)
    monkeypatch.setattr(FittedThreads, "halvings", 0)
    monkeypatch.setattr(FittedThreads, "warned", False)
    total = [0.0, 0.0]

    def run(ran: float, waited: float) -> None:
        total[0] += ran
        total[1] += waited
        threads.WAITS.write_text(f"{total[0] * 1e9:.0f} {total[1] * 1e9:.0f} 17\n")

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    run(5, 5)  # before the context
    yield run
    torch.set_num_threads(before)


def test_threads_are_halved_while_the_cores_are_wanted_and_doubled_when_they_are_free(run: Run):
    counts = []
    with FittedThreads(IN_C) as fitted, pytest.warns(UserWarning, match="so 2 of 4 threads draw") as caught:  # type: ignore[arg-type]
        for ran, waited in [
            (0.1, 0.001),
            *[(0.1, 0.1)] * 3,
            (0.6, 0),
            (0.6, 0),
            (0.1, 0.1),
            (1.1, 0),
            (1.1, 0),
            (9, 0),
        ]:
            run(ran, waited)
            fitted.update()
            counts.append(torch.get_num_threads())
    assert counts == [4, 2, 1, 1, 1, 2, 1, 2, 4, 4]
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore:other work")
def test_the_next_drawing_begins_with_as_many_threads_as_the_last_one_had(run: Run):
    for _ in range(2):
        with FittedThreads(IN_C) as fitted:  # type: ignore[arg-type]
            before = torch.get_num_threads()
            run(0.1, 0.1)
            fitted.update()
        assert torch.get_num_threads() == 4
    assert before == 2


def test_passes_that_pytorch_computes_keep_their_threads(run: Run):
    with FittedThreads(IN_PYTORCH) as fitted, warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.simplefilter("error")
        run(0.1, 0.1)
        fitted.update()
        assert torch.get_num_threads() == 4
