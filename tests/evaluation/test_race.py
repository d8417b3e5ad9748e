"""A race over a tiny model: the order of turns, what is recorded, and resuming."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from helpers.refusals import rejects

from lanternpp.api.model import Model
from lanternpp.api.options import BASELINE, Dial, Settings
from lanternpp.api.pipeline import Pipeline
from lanternpp.api.settings import with_tree
from lanternpp.engine.decode import Engine
from lanternpp.evaluation import equal, profile, report
from lanternpp.evaluation.race import DIALS_BY_KEY, PICTURES, TURNS, Race, parse_methods

PROMPTS = ["a red tulip", "a tulip"]
METHODS = "lantern++ lambda=3, jacobi"


def race(pipe: Pipeline, n: int = 2, field: str = METHODS, **shared) -> Race:
    return Race(pipe, parse_methods(field), PROMPTS, n, 5, shared, measure_tv=True)


def test_methods_are_read_with_what_they_override() -> None:
    plain, one, two = parse_methods("lantern++ k=10  lambda=2.5, eagle tree=chain-3")
    assert plain.label == BASELINE
    assert one.label == "lantern++ k=10 lambda=2.5" and one.overrides == {"neighbours": 10, "lam": 2.5}
    assert two.method == "eagle" and two.overrides == {"tree": "chain-3"}
    assert [e.label for e in parse_methods("eagle, ar")] == ["ar", "eagle"]
    _, tree, last = parse_methods("eagle tree=[[0], [1],[0,1]] k=5, jacobi")
    assert tree.overrides == {"tree": "[[0],[1],[0,1]]", "neighbours": 5} and last.method == "jacobi"
    _, other = parse_methods("eagle tree=[[0],[1,0],[1]] k=5")
    assert tree.slug != other.slug
    _, one, two = parse_methods("eagle tree=my/tree.json, eagle tree=my:tree.json")
    assert one.slug != two.slug


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("lantern+++", "lantern+++"),
        ("ar,,eagle", "empty"),
        ("lantern++ lambda=", "'lambda='"),
        ("lantern++ lambda=two", "'two'"),
        ("lantern++ k=1.5", "'1.5'"),
        ("lantern++ cfg=3", "'cfg=3'"),
        ("eagle hard=yes", "'yes' is not true or false"),
        ("lantern++ k=10 neighbours=5", "gives a dial twice"),
    ],
)
def test_a_wrong_entry_is_named(text: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DIALS_BY_KEY, "hard", Dial(name="hard", kind=bool))
    assert parse_methods("eagle hard=false")[1].overrides == {"hard": False}
    rejects(re.escape(named), parse_methods, text)


def test_methods_take_turns_and_each_goes_first_in_its_turn(pipe: Pipeline) -> None:
    turns = list(race(pipe).turns())
    assert len(turns) == 3 * 2 * 2 and len({(e.label, p, s) for e, p, s in turns}) == len(turns)
    rounds = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert all(len({(p, s) for _, p, s in each}) == 1 for each in rounds)
    assert {each[0][0].label for each in rounds} == {e.label for e in race(pipe).entries}
    pictures = {(prompt, seed) for _, prompt, seed in turns}
    assert len({seed for _, seed in pictures}) == len(pictures), "pictures of one seed share their noise"


def test_recorded_turns_are_those_of_the_pipeline(pipe: Pipeline, tmp_path: Path) -> None:
    turns = race(pipe).run(tmp_path)
    for turn in turns:
        assert all((tmp_path / name).is_file() for name in turn.files) and len(turn.files) == 1
        assert all(sum(accepted) == pipe.target.length for accepted in turn.accepted)
        assert turn.seconds >= sum(v for k, v in turn.phases.items() if k != "rest") > 0
        assert (turn.tv_cost is not None) == (turn.seed in (5, 7))
    relaxed = next(t for t in turns if t.label.startswith("lantern++") and (t.prompt, t.seed) == (1, 8))
    alone = pipe(PROMPTS[1], seed=8, method="lantern++", lam=3.0, batch_size=1)
    assert relaxed.accepted == [alone.stats.accepted_per_pass]
    costs = {t.label: t.tv_cost for t in turns if t.seed == 5}
    assert costs["ar"] == costs["jacobi"] == [0.0] and costs["lantern++ lambda=3"][0] > 0


def test_the_steps_of_a_row_are_those_of_its_engine(pipe: Pipeline, tmp_path: Path, monkeypatch) -> None:
    """Of five pictures, two at a time: the next one takes the slot of the first that is finished."""
    step, taken = Engine.step, Counter[Engine]()
    monkeypatch.setattr(Engine, "step", lambda engine: (taken.update([engine]), step(engine)))
    mine = Race(pipe, parse_methods(METHODS), PROMPTS[:1], 5, 5, {"batch_size": 2}, False, turn_size=5)
    for row in report.rows(mine.run(tmp_path), mine.describe(), {}):
        assert 2 * row["steps"] == taken[mine.engines[row["method"]]], "with those of the warm-up"


def test_a_profile_without_traced_kernels_has_no_shares(pipe: Pipeline, tmp_path: Path, monkeypatch) -> None:
    made, timed, profiler = race(pipe, field="ar"), [], MagicMock()
    profiler.key_averages().__iter__.return_value = [SimpleNamespace(key="aten::mm", self_cpu_time_total=0)]
    profiler.key_averages().table.return_value = ""
    profiler.export_chrome_trace = lambda path: Path(path).touch()
    monkeypatch.setattr(profile, "profile_steps", lambda *_: profiler)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda i: nullcontext(timed.append(i)))
    # The rates are those of the named card, and of the dtype that the backend multiplies in.
    measure = MagicMock(return_value=profile.machine_rates(torch.device("meta:1"), torch.float32))
    monkeypatch.setattr(profile, "machine_rates", measure)
    monkeypatch.setattr(profile, "backend", lambda _: SimpleNamespace(gemm_dtype=lambda _: torch.float64))
    table = report.rows(made.run(tmp_path), made.describe(), {})
    assert profile.profile_race(made, table, tmp_path)[0][-1] == "aten::mm 0" and timed == [1, 1]
    measure.assert_called_once_with(torch.device("cpu"), torch.float64)


def test_a_stopped_run_resumes_at_its_turn_and_with_its_draft(
    pipe: Pipeline, tmp_path: Path, monkeypatch
) -> None:
    """A fit returns another draft in every call, as it may once acceptance rates are known."""
    levels = iter(range(2, 100))
    options = {"method": "lantern++", "lam": 3.0, "batch_size": 1, "measure_tv": True}
    alone = pipe(PROMPTS[0], seed=5, tree="chain-2", **options).stats

    def fit(self: Pipeline, settings: Settings) -> Settings:
        return with_tree(settings, f"chain-{next(levels)}") if settings.tree else settings

    monkeypatch.setattr(Pipeline, "fit", fit)
    begun = race(pipe).run(tmp_path)
    first = next(turn for turn in begun if turn.seed == 5 and turn.label.startswith("lantern++"))
    assert first.accepted == [alone.accepted_per_pass] and first.tv_cost == alone.tv_cost_per_image
    pictures = {path: path.read_bytes() for path in (tmp_path / PICTURES).rglob("*.png")}
    for path in pictures:
        path.unlink()
    log = (tmp_path / TURNS).read_text().splitlines(keepends=True)
    (tmp_path / TURNS).write_text("".join(log[:7]) + log[7][:40])  # three fits, four turns and a bit
    again = race(pipe)
    resumed = again.run(tmp_path)
    assert len((tmp_path / TURNS).read_text().splitlines()) == len(log) == 3 + 12
    assert [(t.label, t.prompt, t.seed, t.accepted, t.tv_cost) for t in resumed] == [
        (t.label, t.prompt, t.seed, t.accepted, t.tv_cost) for t in begun
    ]
    assert {path: path.read_bytes() for path in pictures} == pictures, "removed pictures are drawn again"
    assert again.describe()["methods"]["lantern++ lambda=3"]["tree"] == "chain-2"


def test_a_run_with_other_settings_or_weights_does_not_resume(
    pipe: Pipeline, tmp_path: Path, monkeypatch
) -> None:
    race(pipe, n=1, field="jacobi").run(tmp_path)
    rejects(r"n 1 -> 2; methods\.jacobi", race(pipe, n=2, field="jacobi window=3").run, tmp_path)
    monkeypatch.setattr(Model, "weights", "another drafter's")
    rejects('weights .* -> "another drafter\'s"', race(pipe, n=1, field="jacobi").run, tmp_path)


def test_a_strength_is_found_and_raced_with_one_draft_and_measured_again_with_another(
    pipe: Pipeline, tmp_path: Path, monkeypatch
) -> None:
    drawn: list[Settings] = []
    monkeypatch.setattr(equal, "variation", lambda *given: drawn.append(given[-1]) or 1.0)
    field, shared, settings = parse_methods("lantern++ k=5"), {"fit": False}, Pipeline.settings

    def tuned(pipe: Pipeline, method: str, batch_size: int = 1, **given) -> Settings:
        return with_tree(settings(pipe, method, batch_size=batch_size, **given), f"chain-{batch_size + own}")

    monkeypatch.setattr(Pipeline, "settings", tuned)
    for own in (1, 1, 2):
        race = Race(pipe, field, PROMPTS, 1, 5, shared, measure_tv=False)
        equal.StrengthSearch(race, 4, tmp_path).tv_per_code(field[1])
        assert drawn[-1].tree == race.requested["lantern++ k=5"].tree == f"chain-{1 + own}"
    assert len(drawn) == 2
