"""`lanternpp compare`: fair turns, medians, one picture and one table or one JSON object."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.latents import write_diffusion
from PIL import Image

from lanternpp import Pipeline
from lanternpp.api.calls import Request
from lanternpp.api.options import DrawOptions
from lanternpp.api.results import Result
from lanternpp.api.settings import with_tree
from lanternpp.cli.options import advise
from lanternpp.engine.decode import Engine

PROMPT = "a photo of a red tulip"
BOUND = "arithmetic bounds this machine"
SECONDS = {"ar": [99.0, 8.0, 80.0, 9.0], "lantern++": [99.0, 4.0, 2.0, 40.0, 77.0]}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What a pipeline draws, in turn. The k-th run of a method is said to take the k-th of its SECONDS."""
    made: list[Request] = []
    draw = Pipeline.draw

    def timed(pipe: Pipeline, engine: Engine, request: Request, progress: object = None) -> Result:
        assert progress is None and not engine.observers, "nothing else is done in a timed run"
        result = draw(pipe, engine, request)
        method = result.stats.method
        seconds = SECONDS[method][sum(one.settings.method == method for one in made)]
        made.append(request)
        stats = replace(result.stats, seconds=seconds, seconds_per_image=seconds / result.stats.images)
        return replace(result, stats=stats)

    monkeypatch.setattr(Pipeline, "draw", timed)
    monkeypatch.setattr(Pipeline, "bound", lambda pipe, settings: BOUND if settings.batch_size == 1 else None)
    return made


@pytest.fixture
def compare(run, model, calls):
    """Compares on the tiny model."""
    return lambda *options: run("compare", PROMPT, "--model", model, *options)


def test_methods_take_turns_after_a_warm_up_and_medians_are_reported(compare, calls, empty_dir: Path) -> None:
    figures = compare("-n", 2, "--seed", 7, "--json").json
    assert [call.settings.method for call in calls] == ["ar", "lantern++"] * 4
    assert all(call.seeds == [7, 8] for call in calls)
    ar, method = figures["methods"]
    assert (ar["method"], ar["seconds"], ar["speedup"]) == ("ar", 9.0, 1.0)
    assert (method["method"], method["seconds"], method["seconds_per_image"]) == ("lantern++", 4.0, 2.0)
    assert figures["speedup"] == method["speedup"] == 9.0 / 4.0
    assert figures["method"] == "lantern++" and figures["passes"] == method["passes"]
    assert figures["bound"] == BOUND
    assert ar["codes"] == method["codes"] == 2 * 16 and ar["codes_per_pass"] == 1
    assert figures["file"] == "out/compare.png"
    with Image.open(empty_dir / "out" / "compare.png") as image:
        assert image.width > 1000 and image.text["prompt"] == PROMPT


def test_plain_decoding_has_the_methods_sampling_and_none_of_its_dials(compare, calls) -> None:
    compare("--lambda", 3, "--tree", "chain-3", "--top-k", 0)
    ar, other = (call.settings for call in calls[:2])
    assert (ar.method, ar.cfg, ar.top_k, ar.compile, ar.batch_size) == ("ar", 2.0, 0, False, 1)
    assert (ar.accept, ar.lam, ar.tree, ar.neighbours) == ("exact", None, None, None)
    assert (other.method, other.lam, other.tree, other.cfg) == ("lantern++", 3, "chain-3", 2.0)


def test_variation_is_measured_in_a_separate_run_and_all_runs_have_the_same_draft(
    compare, calls, monkeypatch
) -> None:
    """Though a fit returns another draft in every call, as it may once acceptance rates are known."""
    levels = iter(range(2, 100))
    monkeypatch.setattr(Pipeline, "fit", lambda pipe, settings: with_tree(settings, f"chain-{next(levels)}"))
    ar, method = compare("--measure-tv", "--json").json["methods"]
    assert [call.settings.measure_tv for call in calls] == [False] * 8 + [True]
    assert {call.settings.tree for call in (*calls[1::2], calls[-1])} == {"chain-2"}
    assert method["tv_cost"] > 0 and method["seconds"] == 4.0 and not ar["tv_cost"]


def test_the_table_has_every_figure_the_draft_and_what_bounds_the_machine(
    compare, calls, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    row = compare("-n", 2, "--measure-tv", "--json").json
    calls.clear()
    out = compare("-n", 2, "--measure-tv").out
    figures = (f"{row['codes_per_pass']:.2f}", f"{row['tv_cost']:.2f}", "TV cost / picture")
    said = ("speed-up", "codes / pass", "lantern++ (auto: the model's own default)", "3 runs", PROMPT, BOUND)
    for text in (*said, *figures, "4.50", "2.00", "16", "1.00", "2.25x", "20.00"):
        assert text in out


@pytest.mark.parametrize(
    ("device", "drawn", "overrides", "said"),
    [
        ("cuda", {}, {}, True),
        ("cuda", {"compile": True}, {}, False),
        ("cuda", {"min_survival": 0.5}, {}, False),
        ("cuda", {}, {"compile": False}, False),
        ("cpu", {}, {}, False),
    ],
)
def test_a_gpu_without_compiled_steps_gets_a_hint(
    device: str, drawn: dict[str, object], overrides: dict[str, object], said: bool, capsys, monkeypatch
) -> None:
    pipe = SimpleNamespace(device=torch.device(device), target=SimpleNamespace(channels=0))
    settings = {"compile": False, "min_survival": None} | drawn
    monkeypatch.setattr("lanternpp.cli.options.on_terminal", lambda: True)
    advise(pipe, settings, DrawOptions(overrides=overrides))
    assert ("`lanternpp models warm`" in capsys.readouterr().err) is said


def test_a_variation_that_cannot_be_measured_is_reported(run, tmp_path: Path) -> None:
    model = write_diffusion(tmp_path / "latents")
    outcome = run("compare", PROMPT, "--model", model, "--accept", "cspd", "--measure-tv", "--runs", 1)
    assert "eagle, rule cspd (auto: its drafter)" in outcome.out and "lossless" not in outcome.out
    assert outcome.code == 0 and "of the rule cspd cannot be measured" in outcome.err
