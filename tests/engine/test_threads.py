"""The number of threads falls while other work uses the cores, and rises again when it ends."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lanternpp import Pipeline
from lanternpp.engine import threads
from lanternpp.engine.threads import AdaptiveThreads
from lanternpp.kernels.binding import own

IN_C: Any = SimpleNamespace(native=object())
IN_PYTORCH: Any = SimpleNamespace(native=None)
Run = Callable[[float, float], None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A function after which the thread has run for so many seconds more, and waited for so many; it has five threads on four cores."""
    monkeypatch.setattr(threads, "SCHEDSTAT", tmp_path / "schedstat")
    monkeypatch.setattr(threads, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(threads, "contention", threads.ContentionState())
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    total = [0.0, 0.0]

    def run(ran: float, waited: float) -> None:
        total[0] += ran
        total[1] += waited
        threads.SCHEDSTAT.write_text(f"{total[0] * 1e9:.0f} {total[1] * 1e9:.0f} 17\n")

    before = torch.get_num_threads()
    torch.set_num_threads(5)
    run(5, 5)  # before the context
    yield run
    torch.set_num_threads(before)


def test_threads_are_halved_while_cores_are_busy_and_doubled_when_they_are_free(run: Run):
    busy, free = (0.1, 0.1), (0.5, 0.0)
    phases = [(0.1, 0.01), busy, busy, busy, free, free, free, free, free, free]
    counts = []
    with AdaptiveThreads(IN_C) as fitted, pytest.warns(UserWarning, match="so 1 of 4 threads draw") as caught:
        for ran, waited in phases:
            run(ran, waited)
            fitted.update()
            counts.append(torch.get_num_threads())
    assert counts == [4, 2, 1, 1, 1, 1, 2, 2, 2, 4]
    assert len(caught) == 1


def test_short_waits_do_not_warn(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threads, "MAX_GAP", 0.0)
    with AdaptiveThreads(IN_C) as fitted, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            run(0.1, 0.1)
            fitted.update()
        assert torch.get_num_threads() == 1


@pytest.mark.filterwarnings("ignore:other work")
def test_while_other_work_lasts_more_threads_are_tried_less_and_less_often(run: Run):
    tried = []
    with AdaptiveThreads(IN_C) as fitted:
        for moment in range(800):  # it is alone until more threads are tried, which then wait
            run(0.05, 0.05 if torch.get_num_threads() > 1 else 0)
            fitted.update()
            if torch.get_num_threads() == 2 and moment > 2:
                tried.append(0.05 * moment)
    gaps = [later - sooner for sooner, later in pairwise(tried)]
    assert gaps[0] < 3 and gaps == pytest.approx(sorted(gaps)) and gaps[-1] > 8


@pytest.mark.filterwarnings("ignore:other work")
def test_the_next_call_begins_with_the_number_of_threads_of_the_last_one(run: Run):
    for _ in range(2):
        with AdaptiveThreads(IN_C) as fitted:
            before = torch.get_num_threads()
            run(0.1, 0.1)
            fitted.update()
        assert torch.get_num_threads() == 5
    assert before == 2


@pytest.mark.filterwarnings("ignore:other work")
@pytest.mark.parametrize("openmp", [True, False])
def test_a_new_thread_has_the_original_number_of_threads(openmp: bool, run: Run):
    decoder, found = Pipeline.from_pretrained("nature-128", device="cpu").target.decoder, []
    if decoder.native is None:
        pytest.skip("no kernels here")
    if not openmp:
        decoder.native.library = SimpleNamespace(use_threads=lambda count: 0)
    with AdaptiveThreads(decoder) as fitted:
        run(0.1, 0.1)
        fitted.update()
        begun = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        begun.start()
        begun.join()
        assert torch.get_num_threads() == (2 if openmp else 5) and own.threads == (0 if openmp else 2)
    assert found == [5] and torch.get_num_threads() == 5 and own.threads == 0


def test_threads_of_passes_by_pytorch_are_not_changed(run: Run):
    with AdaptiveThreads(IN_PYTORCH) as fitted, warnings.catch_warnings():
        warnings.simplefilter("error")
        run(0.1, 0.1)
        fitted.update()
        assert torch.get_num_threads() == 5


@pytest.mark.filterwarnings("ignore:other work")
def test_a_nested_context_does_not_change_the_threads(run: Run):
    with AdaptiveThreads(IN_C) as outer:
        run(0.1, 0.1)
        outer.update()
        with AdaptiveThreads(IN_C) as inner:
            run(0.1, 0.1)
            inner.update()
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
