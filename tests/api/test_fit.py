"""Drafts that are fitted to the machine: the choice from given times, stored measurements, and counts while drawing."""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from time import sleep
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.families import write_janus
from helpers.models import write_model
from helpers.refusals import rejects
from helpers.served import submit

from lanternpp import Pipeline
from lanternpp.accept.neighbours import LanternPlusPlus
from lanternpp.api import fit
from lanternpp.api.calls import Request
from lanternpp.api.defaults import Defaults
from lanternpp.api.fit import (
    MIN_PASSES,
    PLAIN,
    Step,
    Steps,
    bound,
    cost_settings,
    disturbed,
    measure,
    plain_settings,
    warm_step,
)
from lanternpp.api.options import Settings
from lanternpp.api.rates import FILE, Counter, Counts, read_rates, strength
from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import AcceptanceByRank, Stopwatch, TimedEngine
from lanternpp.errors import InputError
from lanternpp.evaluation.race import Race, parse_methods
from lanternpp.proposers.parallel import Parallel
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.config import ServerConfig
from lanternpp.serve.tickets import Ticket
from lanternpp.training import drafter
from lanternpp.training.drafter import record_rates, strengths
from lanternpp.trees.static import chain
from lanternpp.util.jsonfile import key_of

PROMPT = "a red tulip"
HALVES = Counts(((8.0,),) * 8, ((4.0,),) * 8, 1000)  # every draft code is accepted half of the time
STEPS = {PLAIN: 1.0, "chain-1": 1.2, "chain-2": 1.3, "chain-4": 2.0, "chain-8": 3.0}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and fits that are switched on."""
    monkeypatch.setattr(fit, "user_cache", lambda: tmp_path / "cache")
    monkeypatch.delenv("LANTERNPP_FIT")
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The tiny model, whose acceptance rates of `parallel` are a half at every level."""
    folder = write_model(tmp_path / "tiny")
    settings = pipeline(folder).settings("parallel")
    write_rates(folder / "parallel", settings, HALVES)
    return folder


def write_rates(folder: Path, settings: Settings, counts: Counts) -> None:
    rows = [{"strength": strength(settings), "counts": asdict(counts)}]
    (folder / FILE).write_text(json.dumps({"acceptance": rows}))


def pipeline(folder: Path) -> Pipeline:
    return Pipeline.from_pretrained(folder, device="cpu", dtype="float32")


def drafted(pipe: Pipeline, **dials: Any) -> str:
    """The draft that is fitted to `parallel`."""
    return pipe.fit(pipe.settings("parallel", **dials)).tree


@pytest.fixture
def pipe(model: Path) -> Pipeline:
    return pipeline(model)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Makes `measure` give these times by draft, of at most `most` drafts; returns the drafts of every measurement."""

    def time(times: dict[str, float], spread: float = 1.0, most: int = 99) -> list[list[str]]:
        asked: list[list[str]] = []

        def given(drafts, length: int) -> Steps:
            asked.append([name for name, _ in drafts])
            measured = enumerate(asked[-1][:most])
            return {name: Step(2 + i, times.get(name, 100.0), 1.0, spread) for i, name in measured}

        monkeypatch.setattr(fit, "measure", given)
        return asked

    return time


def test_the_draft_with_the_most_codes_per_second_is_chosen(pipe: Pipeline, timed) -> None:
    asked = timed(STEPS)
    fitted = pipe.fit(pipe.settings("parallel"))
    # codes per pass: 1, 1.5, 1.75, 1.94, 2.0
    assert (fitted.tree, fitted.method, fitted.fit) == ("chain-2", "parallel", True)
    assert asked[0][:2] == [PLAIN, "chain-6"], "plain decoding and the method's own draft are measured first"
    assert {"chain-1", "chain-8"} <= set(asked[0]) and "chain-10" not in asked[0], "rates end at 8 levels"
    assert pipe.fit(pipe.settings("parallel")) == fitted and len(asked) == 1


# A chain of 1 decides 1.5 codes: it is slower than plain decoding, or faster within the error of a measurement.
@pytest.mark.parametrize("seconds", [1.6, 1.45])
def test_plain_decoding_is_chosen_where_no_draft_is_clearly_faster(pipe: Pipeline, timed, seconds) -> None:
    timed({PLAIN: 1.0, "chain-1": seconds, "chain-2": 1.8})
    settings = pipe.settings("parallel")
    fitted = pipe.fit(settings)
    assert fitted == plain_settings(settings) and fitted.method == "ar" and fitted.fit
    drawn = pipe(PROMPT, method="parallel")
    assert torch.equal(drawn.codes, pipe(PROMPT, method="ar").codes) and drawn.stats.method == "ar"


def test_a_draft_that_is_given_or_tuned_is_not_fitted(pipe: Pipeline, model: Path, timed) -> None:
    asked = timed(STEPS)
    for method, given in (
        ("parallel", {"tree": "chain-5"}),
        ("parallel", {"compile": True}),
        ("parallel", {"fit": False}),
        ("jacobi", {"window": 4}),
        ("eagle2", {}),  # its drafts have no fixed shape
        ("ddd", {}),
        ("ar", {}),
    ):
        settings = pipe.settings(method, **given)
        assert pipe.fit(settings) == replace(settings, fit=False)
    settings = pipe.settings("parallel", fit=False)
    Defaults.read(model).add_tuned("parallel", pipe.conditions(settings), {"tree": "chain-7"}, machine={})
    assert drafted(pipeline(model)) == "chain-7" and not asked


class OwnRule(LanternPlusPlus):
    """A custom rule, whose code may change."""


class OwnProposer(Parallel):
    """As above."""


@pytest.mark.parametrize(
    "own", [{"accept": f"{__name__}:OwnRule"}, {"accept": OwnRule}, {"proposer": OwnProposer}]
)
def test_custom_parts_are_neither_fitted_nor_counted(model: Path, timed, own: dict[str, Any]) -> None:
    asked, method = timed(STEPS), "lantern++" if "accept" in own else "parallel"
    dials = {"proposer": "parallel", "tree": None, "neighbours": 3} if "accept" in own else {}
    settings = pipeline(model).settings(method, **dials | own)
    write_rates(model / "parallel", settings, HALVES)  # of what once had this name
    pipe = pipeline(model)
    assert pipe.fit(settings) == replace(settings, fit=False) and not asked
    assert not pipe.new_engine(settings).observers


def test_every_batch_size_has_its_own_fit_which_a_server_uses(pipe: Pipeline, timed) -> None:
    asked = timed(STEPS)
    with_two = pipe.at_batch(pipe.settings("parallel", batch_size=1), 2)
    assert (with_two.tree, with_two.batch_size) == ("chain-2", 2) and len(asked) == 1
    pipe.fit(pipe.settings("parallel"))
    assert len(asked) == 2
    batcher = Batcher(pipe, ServerConfig(slots=2))
    try:
        drawn = submit(batcher, Ticket(PROMPT, 3, pipe.settings("parallel", batch_size=1))).result(300)
    finally:
        batcher.close(False, 0)
    assert drawn.settings.tree == "chain-2" and len(asked) == 2
    assert torch.equal(drawn.codes, pipe(PROMPT, seed=3, method="parallel").codes[0])


def test_another_process_reads_what_was_measured(model: Path, timed, own_cache: Path) -> None:
    asked = timed(STEPS)
    first = pipeline(model)(PROMPT, method="parallel")
    second = pipeline(model)(PROMPT, method="parallel")
    assert len(asked) == 1 and torch.equal(first.codes, second.codes)
    assert first.stats.settings["tree"] == "chain-2" and first.stats.settings == second.stats.settings
    (file,) = own_cache.iterdir()
    for name in ("processor", "flags", "threads", "dtype", "weights", "kernels", "torch", "lanternpp"):
        assert json.loads(file.read_text())["facts"][name]


def test_drafts_beyond_the_budget_are_measured_by_later_processes(model: Path, timed) -> None:
    for _ in range(2):
        asked = timed(STEPS, most=5)
        pipe = pipeline(model)
        assert [drafted(pipe), drafted(pipe)] == ["chain-2"] * 2 and len(asked) == 1, "once in a process"
    assert asked == [[PLAIN, "chain-3", "chain-5", "chain-1", "chain-7"]]
    assert drafted(pipeline(model)) == "chain-2" and len(asked) == 1


def test_of_two_processes_that_measure_at_once_the_first_to_write_sets_a_step(own_cache: Path) -> None:
    slow, fast = fit.Store(), fit.Store()
    known, other, later = Step(6, 1.5, 0.8, 1.0), Step(6, 1.6, 0.8, 1.0), Step(8, 1.8, 1.2, 1.0)
    fast.add_steps("a", {"chain-4": known})
    slow.add_steps("a", {"chain-4": other, "chain-6": later})
    assert slow.steps["a"] == {"chain-4": known, "chain-6": later}


def test_disturbed_measurements_are_not_stored(model: Path, timed, own_cache: Path) -> None:
    asked = timed(STEPS, spread=1.6)
    for _ in range(2):
        pipe = pipeline(model)
        assert drafted(pipe) == drafted(pipe) == "chain-2"
    assert len(asked) == 2 and not own_cache.exists()
    pipe._fit.store.add_counts("a", HALVES)
    (file,) = own_cache.iterdir()
    assert json.loads(file.read_text())["steps"] == {}, "nor stored with later counts"


@pytest.mark.parametrize("write", [write_model, write_janus])
def test_a_pipeline_is_freed_with_its_last_reference(write: Callable[[Path], Any], tmp_path: Path) -> None:
    write(tmp_path / "model")
    pipe = pipeline(tmp_path / "model")
    pipe.fit(pipe.settings("jacobi"))
    weight = weakref.ref(next(pipe.target.parameters()))
    del pipe
    assert weight() is None


@pytest.mark.parametrize("damage", ["{", '{"steps": {"a": [{"draft": "plain"}]}}'])
def test_a_damaged_file_warns_once_and_is_measured_again(
    pipe: Pipeline, model: Path, timed, own_cache: Path, damage: str
) -> None:
    asked = timed(STEPS)
    pipe.fit(pipe.settings("parallel"))
    (file,) = own_cache.iterdir()
    file.write_text(damage)
    other = pipeline(model)
    with pytest.warns(UserWarning, match="this machine is measured again") as said:
        assert drafted(other) == "chain-2"
        other.fit(other.settings("parallel", batch_size=2))
    assert len(said) == 1 and len(asked) == 3 and json.loads(file.read_text())["steps"]


def test_unknown_rates_are_counted_while_drawing(model: Path, timed) -> None:
    (model / "parallel" / FILE).unlink()
    asked = timed(STEPS)
    pipe = pipeline(model)
    observer = AcceptanceByRank(pipe.target.length)
    settings = pipe.fit(pipe.settings("parallel"))
    assert (settings.tree, settings.fit) == ("chain-6", False) and not asked
    engine = pipe.new_engine(settings)
    engine.observers.append(observer)
    seed = 0
    while pipe._fit.counts(settings) is None:
        pipe.draw(engine, Request([PROMPT], [seed], settings))
        seed += 1
    known = pipe._fit.counts(settings)
    assert engine.observers == [observer], "once enough is counted, steps may be taken whole again"
    assert MIN_PASSES <= known.passes <= int(observer.passes)
    assert known.codes(chain(6)) == pytest.approx(int(observer.codes) / int(observer.passes), rel=0.1)
    assert known.codes(chain(2)) < known.codes(chain(6))
    other = pipeline(model)  # another process reads the counts
    assert other.fit(other.settings("parallel")).fit and len(asked) == 1
    assert other.fit(other.settings("parallel", temperature=0.5)).fit is False, (
        "another strength, not counted yet"
    )


def test_only_the_fitted_draft_is_counted_and_not_by_timed_engines(model: Path, tmp_path: Path) -> None:
    (model / "parallel" / FILE).unlink()
    pipe = pipeline(model)
    race = Race(pipe, parse_methods("parallel"), [PROMPT], 1, 0, {}, measure_tv=False)
    race.run(tmp_path / "race")
    settings = race.settings["parallel"]
    assert [type(each) for each in race.engines["parallel"].observers] == [Stopwatch]
    assert not pipe.new_engine(replace(settings, tree="chain-2")).observers, "its counts would be too shallow"
    (counter,) = pipe.new_engine(settings).observers
    assert type(counter) is Counter


def test_counts_add_up_where_nothing_can_be_written(own_cache: Path, monkeypatch) -> None:
    some = replace(HALVES, passes=MIN_PASSES // 2)
    first = fit.Store()
    assert first.add_counts("a", some) and first.complete_counts("a") is None
    first.add_steps("a", {PLAIN: Step(2, 1.0, 1.0, 1.0)})
    monkeypatch.setattr(fit, "write_json", Mock(side_effect=InputError("a read-only file system")))
    with pytest.warns(UserWarning, match="not kept for the next run") as said:
        other = fit.Store()
        other.add_steps("a", {"chain-1": Step(4, 1.0, 1.0, 1.0)})
        assert not other.add_counts("a", some)
    assert len(said) == 1 and len(other.steps["a"]) == 2
    enough = Counts(((16.0,),) * 8, ((8.0,),) * 8, MIN_PASSES)
    assert not other.add_counts("a", HALVES) and other.complete_counts("a") == enough, "enough stays as it is"


def test_a_file_keeps_only_the_latest_settings(own_cache: Path, monkeypatch) -> None:
    """A server's clients may ask for any number of temperatures."""
    monkeypatch.setattr(fit, "MAX_SETTINGS", 3)
    some = Counts(((1.0,),), ((1.0,),), 1)
    for name in ("a", "b", "c", "a", "d"):
        fit.Store().add_counts(name, some)
    later = fit.Store()
    later.read()
    assert list(later.counts) == ["c", "a", "d"] and later.counts["a"].passes == 2


def test_a_training_stores_the_rates_of_its_drafter(pipe: Pipeline, model: Path, timed) -> None:
    methods = strengths(pipe, "parallel")
    assert [(m.method, m.lam, m.tree) for m in methods] == [
        ("parallel", None, "chain-4"),
        *(("lantern++", lam, "chain-4") for lam in (1.5, 2.0, 3.0)),
    ]
    timed(STEPS)
    codes = record_rates(pipe, methods[:2], model / "parallel", [PROMPT])
    assert codes.keys() == {"parallel", "lantern++ lambda 1.5"} and min(codes.values()) >= 1
    (name, counts), relaxed = read_rates(model / "parallel").items()
    assert name == key_of(strength(methods[0])) and json.loads(relaxed[0])["lam"] == 1.5
    shorter = pipe.settings("parallel", tree="chain-2", batch_size=8)
    engine, observer = pipe.new_engine(shorter), AcceptanceByRank(pipe.target.length)
    engine.observers.append(observer)
    pipe.draw(engine, Request([PROMPT] * 64, range(500, 564), shorter))
    assert counts.codes(chain(2)) == pytest.approx(int(observer.codes) / int(observer.passes), rel=0.08)
    known = pipeline(model)
    assert known.fit(pipe.settings("parallel")).fit and known._fit.counts(methods[1]) == relaxed[1]


def test_drafts_that_fit_into_no_picture_have_no_rates(pipe: Pipeline, model: Path, monkeypatch) -> None:
    monkeypatch.setattr(drafter, "PASSES", 10)
    deep = pipe.settings("parallel", tree="chain-16", batch_size=2)  # a picture has 16 codes
    assert record_rates(pipe, [deep], model / "parallel", [PROMPT]) == {}
    assert read_rates(model / "parallel") == {} and (model / "parallel" / FILE).is_file()


def test_damaged_rates_are_rejected(model: Path) -> None:
    counts = {"tried": [[1]], "kept": [[2]], "passes": 3}
    (model / "parallel" / FILE).write_text(json.dumps({"acceptance": [{"strength": {}, "counts": counts}]}))
    rejects("is damaged", pipeline(model), PROMPT, method="parallel")


@pytest.mark.parametrize("method", ["parallel", "lantern-static", "lantern-jacobi", "jacobi"])
def test_every_method_with_a_fixed_shape_can_be_measured(model: Path, method: str, monkeypatch) -> None:
    """With real steps; only that the choice is one of the measured drafts is tested."""
    pipe, batch = pipeline(model), 3
    settings = pipe.settings(method, batch_size=batch, cfg=2.0)
    sixteen = Counts(((8.0,) * 5,) * 16, ((4.0,) * 5,) * 16, 1000)
    monkeypatch.setattr(type(pipe._fit), "counts", lambda self, settings: sixteen)
    fitted = pipe.fit(settings)
    steps = pipe._fit._measured(key_of(cost_settings(settings)))
    assert fit.draft_name(fitted) in steps and len(steps) >= 2
    assert (steps[PLAIN].rows, steps[PLAIN].time) == (2 * batch, 1)
    assert all(
        step.rows > 2 * batch and 0 < step.target < step.time for name, step in steps.items() if name != PLAIN
    )
    assert len(pipe(PROMPT, n=batch, method=method, cfg=2.0, batch_size=batch).images) == batch


def test_a_measurement_ends_with_its_budget_but_has_two_drafts(pipe: Pipeline, monkeypatch) -> None:
    made: dict[str, weakref.ref[Engine]] = {}

    def engine(tree: str) -> Engine:
        assert not any(earlier() for earlier in [*made.values()][1:]), (
            "memory may have no room for two drafts"
        )
        if tree == "chain-4":
            raise InputError("too little memory")
        engine = pipe.new_engine(pipe.settings("parallel", tree=tree))
        made[tree] = weakref.ref(engine)
        return engine

    drafts = [(f"chain-{n}", lambda n=n: engine(f"chain-{n}")) for n in (1, 2, 3, 4)]
    monkeypatch.setattr(fit, "SECONDS", 0.0)
    monkeypatch.setattr(fit, "SHARE", 0.0)
    assert [*measure(drafts, 16)] == [*made] == ["chain-1", "chain-2"]
    monkeypatch.setattr(fit, "SECONDS", 1000.0)
    made.clear()
    assert [*measure(drafts, 16)] == ["chain-1", "chain-2", "chain-3"]
    assert measure([drafts[0], drafts[3]], 16) == measure([drafts[3], drafts[0]], 16) == {}


def test_a_machine_without_a_processor_name_is_identified_by_its_cores(tmp_path: Path, monkeypatch) -> None:
    """As machines with cores of ARM, and those without /proc."""
    seen, cpuinfo = [], tmp_path / "cpuinfo"
    monkeypatch.setattr(fit, "CPUINFO", cpuinfo)
    for part, cores in (("", 4), ("", 8), ("0xd0c", 8), ("0xd40", 8)):
        if part:
            cpuinfo.write_text(f"processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: {part}\n")
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        seen.append(fit.machine_facts(torch.device("cpu"))["processor"])
    assert len(set(seen)) == 4


@pytest.mark.parametrize(("seconds", "cold"), [(1e-3, 1), (1.0, 3)])
def test_a_step_is_timed_after_one_of_the_same_engine_unless_it_is_slow(
    pipe: Pipeline, monkeypatch, seconds: float, cold: int
) -> None:
    """A step after another engine's takes three times as long here, as its weights are no longer in the caches."""
    order = [None]

    def step(timed: TimedEngine, zero_cache: bool = False) -> tuple[float, float]:
        order.append(timed)
        taken = seconds * timed.rows * (1 if order[-2] is timed else 3)
        return taken, taken

    monkeypatch.setattr(TimedEngine, "midway_step", step)
    engines = (pipe.new_engine(pipe.settings(name, cfg=1.0)) for name in ("ar", "parallel"))
    plain, drafted = map(TimedEngine, engines)
    for timed in (plain, drafted, plain):
        assert warm_step(timed)[0] == cold * seconds * timed.rows


def test_plain_decoding_is_timed_once_drafts_have_left_the_caches(pipe: Pipeline, monkeypatch) -> None:
    """The first four steps of plain decoding after another engine's take twice as long here."""
    made = pipe.new_engine(pipe.settings("ar"))
    warm_steps = 0

    def step(timed: TimedEngine, zero_cache: bool = False) -> tuple[float, float]:
        nonlocal warm_steps
        sleep(0.0005)
        warm_steps = warm_steps + 1 if timed.engine is made else 0
        taken = 4e-3 if not warm_steps else 2e-3 if warm_steps <= 4 else 1e-3
        return taken, taken

    monkeypatch.setattr(TimedEngine, "midway_step", step)
    drafts = ((PLAIN, lambda: made), ("parallel", lambda: pipe.new_engine(pipe.settings("parallel"))))
    assert measure(drafts, 16)["parallel"].time == 4


def test_steps_that_all_waited_for_a_core_are_disturbed(pipe: Pipeline, monkeypatch) -> None:
    """All by the same factor, so that the spread is small; a sleeping thread stands for one that waits."""

    def step(timed: TimedEngine, zero_cache: bool = False) -> tuple[float, float]:
        sleep(0.01)
        return 0.01, 0.01

    monkeypatch.setattr(TimedEngine, "midway_step", step)
    drafts = [(name, lambda n=name: pipe.new_engine(pipe.settings(n))) for name in ("ar", "parallel")]
    steps = measure(drafts, 16)
    assert disturbed(steps.values()) and {step.time for step in steps.values()} == {1}


def test_memory_or_arithmetic_bounds_a_machine_by_the_times_of_its_passes() -> None:
    def steps(*passes: tuple[int, float]) -> list[Step]:
        return [Step(rows, 2 * target, target, 1.0) for rows, target in passes]

    assert bound(steps((2, 1.0), (8, 1.1))) is None
    assert bound(steps((2, 1.0), (8, 1.1), (26, 1.9))) == (
        "memory bounds this machine: a pass over 26 rows takes at most twice as long as one over 2"
    )
    assert bound(steps((2, 1.0), (26, 7.0), (8, 1.9))) == (
        "memory bounds passes over up to 8 rows on this machine, arithmetic larger ones"
    )
    assert bound(steps((2, 1.0), (8, 2.5), (26, 7.0))).startswith("arithmetic bounds this machine")
    assert disturbed([Step(2, 1, 1, spread) for spread in (1.0, 1.1, 1.4)])
    assert not disturbed([Step(2, 1, 1, spread) for spread in (1.0, 1.1, 1.3)])
    assert disturbed(steps((2, 1), (16, 3.2), (8, 4.2)))
    assert not disturbed(steps((2, 1), (16, 3.2), (8, 4.1)))


def test_the_shipped_drafters_have_acceptance_rates() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = Pipeline.from_pretrained("nature-128", device="cpu", tuned=False)
        settings = [pipe.settings(method) for method in ("parallel", "lantern++", "eagle", "jacobi-coupled")]
        settings += [pipe.settings("lantern++", lam=lam) for lam in (1.5, 3.0)]
        assert all(pipe._fit.counts(each) is not None for each in settings)
