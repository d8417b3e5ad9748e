"""A tuning on the tiny model, with given costs: what it tries, what it chooses, and resuming."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import optuna
import pytest
from helpers.refusals import rejects

from lanternpp import InputError
from lanternpp.accept.mixture import DraftMixture
from lanternpp.api.settings import with_tree
from lanternpp.engine.observers import AcceptanceByRank, TimedEngine
from lanternpp.trees import static_shape
from lanternpp.trees.static import is_chain
from lanternpp.tuning import study
from lanternpp.tuning.candidates import PlainEngine, Space, acceptance_table, draw
from lanternpp.tuning.options import TuningOptions
from lanternpp.tuning.study import LOG, Tuner

PROMPTS = ["a red tulip", "a tulip"]
SMALL = TuningOptions(trials=12, rounds=2, nodes=12, depth=4)


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Pictures take as many plain pictures as a draft has tokens away from 5, and 0.5; returns the prompts that are drawn."""
    drawn: list[str | None] = []

    def draw(pipe, settings, plain, prompt, seeds):
        drawn.append(prompt)
        nodes = len(static_shape(settings.tree)) if settings.tree else settings.window
        seconds = {"outside": 0.5 + abs(nodes - 5), "step": 0.0, "plain": 1.0, "plain_step": 0.1}
        figures = seconds | {"codes_per_pass": 2.0}
        return figures | {"nodes": nodes, "tried": [[4.0, 2.0]], "kept": [[2.0, 1.0]]}

    monkeypatch.setattr(study, "draw", draw)
    monkeypatch.setattr(study, "PlainEngine", lambda *_: None)
    return drawn


def tuner(pipe, folder, method="eagle", options=SMALL, given=None, **more) -> Tuner:
    return Tuner(pipe, method, given or {}, PROMPTS, folder, options, **more)


def test_the_cheapest_draft_is_found(pipe, tmp_path, priced) -> None:
    made = tuner(pipe, tmp_path, options=replace(SMALL, trials=30))
    found = made.tune()
    assert found.nodes == 5 and found.speedup == pytest.approx(2)
    tried = made.candidates()
    assert len({json.dumps(one.overrides) for one in tried}) == len(tried), "none is drawn twice"
    shapes = [static_shape(one.overrides["tree"]) for one in tried]
    assert all(len(shape) <= 12 and max(map(len, shape)) <= 4 for shape in shapes)
    assert any(map(is_chain, shapes)) and not all(map(is_chain, shapes))
    pruned = [one for one in tried if not one.complete]
    assert pruned and all(one.pictures == 1 and one.speedup < found.speedup for one in pruned)
    few = tuner(pipe, tmp_path / "few", options=replace(SMALL, trials=3))
    few.tune()
    assert len(few.candidates()) == 3


@pytest.mark.parametrize("given", [{"tree": "chain-2"}, {}])
def test_the_methods_own_draft_is_the_fitted_one(pipe, tmp_path, priced, monkeypatch, given) -> None:
    monkeypatch.setattr(pipe, "fit", lambda own: with_tree(own, "chain-2") if own.fit else own)
    made = tuner(pipe, tmp_path, "parallel", given=given)
    found = made.tune()
    chain = {"tree": "[[0],[0,0]]", "min_survival": 0.0}
    assert made.is_own_draft(replace(found, overrides=chain))
    for other in ({"tree": "chain-3"}, {"tree": "[[0],[1]]"}, chain | {"verify": "token"}):
        assert not made.is_own_draft(replace(found, overrides=other))
    raced = made.race(replace(found, overrides={"tree": "chain-3"}))
    assert [row["settings"]["tree"] for row in raced] == [None, "chain-2", "chain-3"]


@pytest.mark.parametrize(
    ("method", "given", "searched"),
    [
        ("jacobi-coupled", {}, {"alternatives"}),
        ("lantern++", {"proposer": "jacobi"}, {"alternatives"}),  # which has no window of its own
        ("jacobi", {"verify": "block"}, set()),  # which takes no alternatives
    ],
)
def test_given_dials_of_a_window_are_kept(method, given, searched, pipe, tmp_path, priced) -> None:
    made = tuner(pipe, tmp_path, method, replace(SMALL, trials=20, depth=3), given | {"init": "last"})
    found = made.tune()
    assert found.overrides.keys() == {"window", "init", "window_rows"} | searched
    for one in made.candidates():
        dials = one.overrides
        assert dials["init"] == "last" and dials["window"] <= 3
        assert dials["window"] * dials["window_rows"] + dials.get("alternatives", 0) <= 12


def test_an_interrupted_tuning_resumes_with_all_recorded_pictures(
    pipe, tmp_path, priced, monkeypatch
) -> None:
    drawn = study.draw

    def stopped(*args):
        if len(priced) == 7:
            raise KeyboardInterrupt
        return drawn(*args)

    monkeypatch.setattr(study, "draw", stopped)
    with pytest.raises(KeyboardInterrupt):
        tuner(pipe, tmp_path).tune()
    log = tmp_path / LOG
    before = log.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {LOG, "run.json"}
    log.write_text(before + '{"key": {"overr')
    monkeypatch.setattr(study, "draw", drawn)
    again = tuner(pipe, tmp_path)
    found = again.tune()
    assert log.read_text().startswith(before)
    pictures = sum(one.pictures for one in again.candidates())
    assert len(priced) == pictures, "pictures from before the interrupt count"
    assert tuner(pipe, tmp_path).tune() == found and len(priced) == pictures


def test_a_budget_limits_the_cost(pipe, tmp_path, priced, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(study, "variation", lambda *given: asked.append(given) or given[-1].lam - 1)
    limited = replace(SMALL, trials=25, budget_tv=2.0)
    found = tuner(pipe, tmp_path / "a", "lantern++", limited).tune()
    assert found.cost is not None and found.cost <= 2 and found.overrides["lam"] <= 3
    assert {"lam", "neighbours", "tree"} <= found.overrides.keys()
    measured = len(asked)
    assert measured < 25, "slow drafts are not measured"
    assert tuner(pipe, tmp_path / "a", "lantern++", limited).tune() == found and len(asked) == measured
    none = replace(limited, budget_tv=0.0)
    with pytest.raises(InputError, match=r"nothing .* stays within 0: the least was"):
        tuner(pipe, tmp_path / "b", "lantern++", none, {"lam": 2.0, "neighbours": 5}).tune()
    unset = pipe.settings("eagle", accept="mixture")  # neither the method nor the user gives its delta
    monkeypatch.setattr(DraftMixture, "strength", ("delta", 0.9, 0.1))  # the exact value may be the greatest
    space = Space(pipe, unset, {}, SimpleNamespace(proposer=None), limited)
    assert space.strengths == ("delta",) and not any("delta" in params for params in space.initial_params())
    assert 0.1 <= space.overrides(optuna.create_study().ask(), ())["delta"] <= 0.9


def test_a_damaged_log_and_a_run_of_something_else_are_rejected(pipe, tmp_path, priced) -> None:
    tuner(pipe, tmp_path).tune()
    (tmp_path / LOG).write_text("{}\n")
    rejects("damaged", tuner, pipe, tmp_path)
    assert tuner(pipe, tmp_path, restart=True).candidates() == []
    assert not (tmp_path / LOG).exists() and tuner(pipe, tmp_path, restart=True), "it was interrupted at once"
    (tmp_path / "b").mkdir()
    (tmp_path / "b/run.json").write_text('{"methods": {}}')
    rejects("something else", tuner, pipe, tmp_path / "b")
    assert (tmp_path / "b/run.json").exists()


@pytest.mark.parametrize(("asked", "batch", "drawn"), [(3, 1, 4), (5, 4, 8), (8, 2, 8)])
def test_a_race_draws_no_fewer_pictures_than_asked_for(
    pipe, tmp_path, priced, monkeypatch, asked: int, batch: int, drawn: int
) -> None:
    pictures, nothing = [], SimpleNamespace(run=lambda *_: [], describe=dict)
    monkeypatch.setattr(
        study, "Race", lambda _, field, prompts, n, *more: pictures.append(n * len(prompts)) or nothing
    )
    monkeypatch.setattr(study.report, "rows", lambda *_: [])
    made = tuner(pipe, tmp_path, options=replace(SMALL, trials=1, n=asked), given={"batch_size": batch})
    made.race(made.tune())
    assert pictures == [drawn]


def test_without_optuna_the_error_says_what_to_install(pipe, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    rejects(r"install lanternpp\[tune\]", tuner, pipe, tmp_path)


def test_rates_seen_often_are_kept_and_others_follow_their_rank() -> None:
    seen = [{"tried": [[1000.0, 100.0], [500.0, 0.0]], "kept": [[900.0, 20.0], [100.0, 0.0]]}] * 2
    table = acceptance_table(seen, 3, 4)
    assert table[0, 0] == pytest.approx(0.9, abs=0.01) and table[1, 0] == pytest.approx(0.2, abs=0.02)
    assert table[2, 0] == pytest.approx(2000 / 3000, abs=0.01), "a depth that was not seen"
    assert table[0, 1] == pytest.approx(0.2, abs=0.01)
    assert (table[:, 2] > table[:, 3]).all() and ((table > 0) & (table < 1)).all()


def test_steps_that_are_counted_are_not_timed(pipe, monkeypatch) -> None:
    """Kernels have no whole step where it is observed, so that drawing is faster than a counted step."""
    step = TimedEngine.step

    def priced(timed: TimedEngine) -> dict[str, float]:
        step(timed)
        counted = any(isinstance(observer, AcceptanceByRank) for observer in timed.engine.observers)
        return {"pass": 9.0 if counted else 1.0}

    monkeypatch.setattr(TimedEngine, "step", priced)
    plain = PlainEngine(pipe, pipe.settings("ar", batch_size=1), "a red tulip")
    row = draw(pipe, pipe.settings("parallel", tree="chain-2", batch_size=1), plain, "a red tulip", [0])
    assert row["step"] == row["plain_step"] == 1.0 and row["tried"][0][0] > 0
