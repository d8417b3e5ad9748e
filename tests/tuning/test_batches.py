"""The tree by batch size: what made-up figures choose, and what measuring the tiny model leaves."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from models import write_model

from lanternpp import Pipeline
from lanternpp.errors import InputError
from lanternpp.settings import Settings
from lanternpp.tuning import batches
from lanternpp.tuning.batches import BatchChoice, Cell, calibrate, plain_settings, sizes
from lanternpp.tuning.journal import LINES, Journal

PROMPTS = ("a red tulip", "a tulip")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No one reads these figures."""
    monkeypatch.setattr(batches, "WARM", 1)
    monkeypatch.setattr(batches, "STEPS", 2)
    monkeypatch.setattr(batches, "COUNTED", 3)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """The tiny model, in a folder of its own."""
    return Pipeline.from_pretrained(
        str(write_model(tmp_path_factory.mktemp("models") / "tiny")), dtype="float32", device="cpu"
    )


def settings(pipe: Pipeline, **given: object) -> Settings:
    return pipe.settings(**{"method": "lantern++", "proposer": "parallel", "tree": "chain-8", **given})


def choice(mine: Settings, speedups: dict[int, dict[str, float]]) -> BatchChoice:
    cells = [
        Cell(rows, tree, 2.0, 1.0, 1.0, value)
        for rows, row in speedups.items()
        for tree, value in row.items()
    ]
    return BatchChoice(mine, tuple(cells))


def test_the_fastest_tree_is_chosen_and_plain_decoding_where_none_gains_enough(pipe) -> None:
    mine = settings(pipe)
    chosen = choice(
        mine,
        {
            1: {"chain-8": 2.0, "chain-6": 2.05, "chain-2": 1.5},
            4: {"chain-8": 1.2, "chain-6": 1.3, "chain-2": 1.6},
            8: {"chain-8": 0.7, "chain-6": 0.9, "chain-2": 1.02},
        },
    )
    assert chosen(mine, 1) == replace(mine, batch_size=1), "its own tree, as another gains less than 3 %"
    assert chosen(mine, 4) == replace(mine, batch_size=4, tree="chain-2")
    assert chosen(mine, 2) == replace(mine, batch_size=2, tree="chain-2"), "not measured: as the next size"
    assert chosen(mine, 8) == pipe.settings("ar", batch_size=8), "2 % is within the margin"
    assert chosen(mine, 16) == pipe.settings("ar", batch_size=16), "nothing was measured there"
    bolder = replace(mine, lam=3.0, cfg=4.0, measure=True)
    assert chosen(bolder, 4) == replace(bolder, batch_size=4, tree="chain-2"), "its own dials are kept"


def test_what_was_not_measured_is_left_as_it_was_asked_for(pipe) -> None:
    mine = settings(pipe)
    slow = choice(mine, {8: {"chain-8": 0.5}})
    for other in (
        settings(pipe, tree="chain-3"),
        settings(pipe, accept="exact", neighbours=None, lam=None),
        settings(pipe, cfg=1.0),
        pipe.settings("jacobi"),
        pipe.settings("ar"),
    ):
        assert slow(other, 8) == replace(other, batch_size=8)


def test_plain_decoding_of_a_method_is_that_of_ar(pipe) -> None:
    shared = {"cfg": 1.5, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "batch_size": 4}
    for method in ("lantern++", "jacobi-coupled", "cool", "ar"):
        assert plain_settings(pipe.settings(method, **shared)) == pipe.settings("ar", **shared)


def test_sizes_are_powers_of_two_up_to_the_last() -> None:
    assert [sizes(n) for n in (1, 2, 6, 16)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16]]


def test_measuring_is_done_once_goes_on_where_it_stopped_and_is_done_again_when_damaged(
    pipe, monkeypatch
) -> None:
    mine = settings(pipe, accept="exact", neighbours=None, lam=None, tree="deep-8")
    first = calibrate(pipe, mine, [1, 2], PROMPTS)
    trees = ["deep-8", *(batches.chain_name(n) for n in batches.CHAINS)]
    assert [(cell.rows, cell.tree) for cell in first.cells] == [(r, t) for r in (1, 2) for t in trees]
    assert all(cell.step > 0 < cell.plain and cell.speedup > 0 for cell in first.cells)
    chains = [cell.codes for cell in first.cells[1:6]]
    assert chains == sorted(chains) and 1 <= chains[0] <= 2, "a longer chain keeps no less"
    (log,) = pipe.folder.glob(f"batches-*/{LINES}")
    drawn = []
    timed = batches._Calibration._time
    monkeypatch.setattr(
        batches._Calibration,
        "_time",
        lambda self, rows, tree: drawn.append((rows, tree)) or timed(self, rows, tree),
    )
    assert calibrate(pipe, mine, [1, 2], PROMPTS) == first and not drawn
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:-2]) + lines[-2][:30])
    reported = []
    again = calibrate(
        pipe, mine, [1, 2], PROMPTS, progress=lambda done, total: reported.append((done, total))
    )
    assert drawn == [(2, trees[-2]), (2, trees[-1])] and again.cells[:-2] == first.cells[:-2]
    assert reported == [(12, 14), (13, 14)]
    log.write_text("?\n" + "".join(lines))
    assert len(calibrate(pipe, mine, [1, 2], PROMPTS).cells) == 12 and len(drawn) == 2 + 12
    other = replace(mine, temperature=0.5)
    assert calibrate(pipe, other, [1], PROMPTS).settings != first.settings and len(drawn) == 2 + 12 + 6


def test_what_a_passing_slowness_of_the_machine_does_to_a_figure(pipe) -> None:
    """A tree's step is told by the plain step beside it."""
    mine = settings(pipe)
    measure = batches._Calibration(pipe, mine, PROMPTS, None)
    quiet = {"begin": 2.0, "plain_begin": 1.0, "steps": [3.0] * 6, "plain": [1.0] * 6}
    busy = {**quiet, "steps": [3.0] * 4 + [90.0, 33.0], "plain": [1.0] * 4 + [30.0, 11.0]}
    cell = measure._cell(2, "chain-8", 5.0, quiet)
    assert measure._cell(2, "chain-8", 5.0, busy) == cell
    passes = (15 + 4 / 2) / 5
    assert cell.speedup == pytest.approx((1 + 15 * 1 / 2) / (2 + passes * 3 / 2))
    assert (cell.step, cell.plain, cell.codes) == (3.0, 1.0, 5.0)


def test_a_method_without_a_tree_is_measured_as_it_is_and_plain_decoding_not_at_all(pipe) -> None:
    jacobi = pipe.settings("jacobi", window=4)
    found = calibrate(pipe, jacobi, [2], PROMPTS)
    assert [(cell.rows, cell.tree) for cell in found.cells] == [(2, None)]
    assert found(jacobi, 2) in (replace(jacobi, batch_size=2), pipe.settings("ar", batch_size=2))
    assert calibrate(pipe, pipe.settings("ar"), [1, 2], PROMPTS).cells == ()


def test_a_tree_tuned_for_a_size_is_among_those_measured_there(tmp_path) -> None:
    folder = write_model(tmp_path / "tiny")
    pipe = Pipeline.from_pretrained(str(folder), dtype="float32", device="cpu")
    mine = settings(pipe, tree=None)
    pipe.tuned.add("lantern++", pipe.conditions(replace(mine, batch_size=4)), {"tree": "[[0],[1]]"})
    pipe = Pipeline.from_pretrained(str(folder), dtype="float32", device="cpu")
    measure = batches._Calibration(pipe, mine, PROMPTS, None)
    assert "[[0],[1]]" in measure.trees(4) and "[[0],[1]]" not in measure.trees(2)


def test_a_folder_that_cannot_be_written_is_warned_of(pipe, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(batches, "tuned_path", lambda model: Path(tmp_path / "file" / "tuned.json"))
    mine = settings(pipe, tree="chain-2", temperature=0.3)
    with pytest.warns(UserWarning, match="are not kept"):
        assert calibrate(pipe, mine, [1], PROMPTS).cells


def test_a_cache_that_can_no_longer_be_written_costs_a_warning(tmp_path) -> None:
    journal = Journal(tmp_path / "gone", {"tuned": "x"}, optional=True)
    shutil.rmtree(tmp_path / "gone")
    with pytest.warns(UserWarning, match="is not kept for the next run"):
        assert journal.once({"tree": 1}, lambda: 3) == 3
    assert journal.once({"tree": 1}, lambda: 4) == 3


def test_a_part_that_is_missing_is_told_of(pipe) -> None:
    with pytest.raises(InputError):
        calibrate(pipe, replace(settings(pipe), neighbours=10**6), [1], PROMPTS)
