"""`lanternpp compare`: fair turns, medians, one picture and one table or one JSON object."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from lanternpp import Pipeline
from lanternpp.api.pipeline import Result, Stats
from lanternpp.models.base import Target

PROMPT = "a photo of a red tulip"
BOUND = "arithmetic bounds this machine"


class FakePipeline:
    """Notes every call; the k-th call of a method takes as long as it is told."""

    model = SimpleNamespace(effect=None)
    target = Target
    device, compiled = SimpleNamespace(type="cpu"), True

    def __init__(self, seconds: dict[str, list[float]]):
        self.seconds, self.calls, self.turn = seconds, [], {name: count() for name in seconds}

    def __call__(self, prompt: str, **options: Any) -> Result:
        requested, n = options["method"], options["n"]
        method = "lantern++" if requested == "auto" else requested
        self.calls.append(options | {"method": method})
        seconds = self.seconds[method][next(self.turn[method])]
        passes = {"ar": 256}.get(method, 64) * n
        shared = {
            "cfg": 2.5,
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "batch_size": n,
            "compile": self.compiled,
        }
        shared |= {"dtype": "bfloat16", "device": "cpu", "window": None}
        shared |= {"fit": method != "ar", "tree": None if method == "ar" else "chain-6"}
        figures = (256 * n, passes, 256 * n / passes, seconds, seconds / n, [], shared, {})
        more = {"tv_cost": 1.25 if options.get("measure_tv") else None}
        more |= {"auto": "the model's own default" if requested == "auto" else None}
        stats = Stats(method, "fake", n, *figures, **more)
        return Result([Image.new("RGB", (8, 8), "teal")] * n, None, stats)

    def settings(self, method: str, **dials: Any) -> dict[str, Any]:
        return {"method": method} | dials

    def bound(self, settings: dict[str, Any]) -> str:
        assert settings["batch_size"] == 1
        return BOUND


@pytest.fixture
def fake(monkeypatch) -> FakePipeline:
    pipe = FakePipeline({"ar": [99.0, 8.0, 80.0, 9.0], "lantern++": [99.0, 4.0, 2.0, 40.0, 77.0]})
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda **_: pipe)
    return pipe


def test_the_sides_take_turns_after_a_warm_up_each(fake, run) -> None:
    assert run("compare", PROMPT, "-n", 2, "--seed", 7).code == 0
    assert [call["method"] for call in fake.calls] == ["lantern++", "ar"] + ["ar", "lantern++"] * 3
    assert all(call["seed"] == 7 and call["n"] == 2 for call in fake.calls)
    assert all(call.get("progress") is None for call in fake.calls)


def test_plain_ar_gets_the_methods_sampling_and_none_of_its_dials(fake, run) -> None:
    run("compare", PROMPT, "--lambda", 3, "--tree", "chain-3", "--top-k", 0)
    ar = next(call for call in fake.calls if call["method"] == "ar")
    assert ar["cfg"] == 2.5 and ar["compile"] is True and ar["batch_size"] == 1
    assert {"lam", "tree", "accept", "delta", "neighbours"}.isdisjoint(ar)
    other = next(call for call in fake.calls if call["method"] == "lantern++")
    assert other["lam"] == 3 and other["tree"] == "chain-3" and "cfg" not in other


def test_measuring_is_a_run_of_its_own(fake, run, monkeypatch) -> None:
    ar, method = run("compare", PROMPT, "--measure-tv", "--json").json["methods"]
    assert [call.get("measure_tv") for call in fake.calls] == [None] * 8 + [True]
    assert (method["tv_cost"], method["seconds"], ar["tv_cost"]) == (1.25, 4.0, None)
    assert fake.calls[-1]["method"] == "lantern++"
    monkeypatch.setenv("COLUMNS", "160")
    fake.turn = {name: count() for name in fake.seconds}
    out = run("compare", PROMPT, "--measure-tv").out
    assert "TV cost / picture" in out and "1.25" in out


def test_json_has_medians_and_the_speed_up(fake, run, elsewhere: Path) -> None:
    figures = run("compare", PROMPT, "-n", 2, "--json").json
    ar, method = figures["methods"]
    assert (ar["method"], ar["seconds"], ar["speedup"]) == ("ar", 9.0, 1.0)
    assert (method["method"], method["seconds"], method["seconds_per_image"]) == ("lantern++", 4.0, 2.0)
    assert figures["speedup"] == method["speedup"] == 9.0 / 4.0
    assert figures["method"] == "lantern++" and figures["passes"] == 128 and figures["bound"] == BOUND
    assert figures["file"] == "out/compare.png" and (elsewhere / "out" / "compare.png").is_file()


def test_the_table_has_every_figure_and_says_what_was_drafted_and_what_bounds_the_machine(
    fake, run, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    out = run("compare", PROMPT, "-n", 2).out
    said = ("speed-up", "codes / pass", "a chain of 6, fitted to this CPU", "3 runs", PROMPT, BOUND)
    for text in (*said, "4.50", "2.00", "256", "64", "4.00", "2.25x", "20.00"):
        assert text in out


@pytest.mark.parametrize(
    ("device", "compiled", "options", "said"),
    [
        ("cuda", False, (), True),
        ("cuda", True, (), False),
        ("cuda", False, ("--no-compile",), False),
        ("cpu", False, (), False),
    ],
)
def test_a_gpu_whose_steps_are_not_compiled_is_told_how(
    device: str, compiled: bool, options: tuple[str, ...], said: bool, fake, run
) -> None:
    fake.device, fake.compiled = SimpleNamespace(type=device), compiled
    assert ("`lanternpp models warm`" in run("compare", PROMPT, *options).err) is said


def test_real_pictures_beside_those_of_plain_ar(run, model, elsewhere: Path) -> None:
    args = ["--method", "eagle", "--runs", 1, "-n", 3, "--batch-size", 2, "--json", "-o", "x.png"]
    figures = run("compare", PROMPT, "--model", model, *args).json
    ar, other = figures["methods"]
    assert ar["codes_per_pass"] == 1 and other["codes_per_pass"] >= 1
    assert ar["settings"]["dtype"] == other["settings"]["dtype"]
    assert ar["codes"] == other["codes"] == 16 * 3
    with Image.open(elsewhere / "x.png") as image:
        assert image.width > 1000 and image.text["prompt"] == PROMPT
