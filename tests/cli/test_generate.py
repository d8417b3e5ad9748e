"""`lanternpp generate`, end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.models import contents
from PIL import Image

from lanternpp.api import engines
from lanternpp.api.options import METHODS
from lanternpp.api.picture import squarest
from lanternpp.engine.decode import Engine, FinishedSample

PROMPT = "a photo of a red tulip"
KEYS = {"model", "images", "codes_per_pass", "seconds", "seconds_per_image", "versions"}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_draws(method: str, run, model, empty_dir: Path) -> None:
    stats = run("generate", PROMPT, "--model", model, "--method", method, "--cfg", 3, "--json").json
    assert stats.keys() >= KEYS and stats["method"] == method and stats["settings"]["cfg"] == 3
    assert stats["codes"] == 16 == sum(stats["accepted_per_pass"])
    assert stats["passes"] == len(stats["accepted_per_pass"])
    with Image.open(empty_dir / "out" / "a-photo-of-a-red-tulip-0.png") as image:
        assert image.size == (16, 16)


def test_the_total_variation_is_reported_if_it_was_measured(run, model) -> None:
    args = ["generate", PROMPT, "--model", model, "-n", 2, "--lambda", 20]
    assert "total variation" not in run(*args).out
    cost = float(run(*args, "--measure-tv").out.split("total variation ")[1].split()[0])
    figures = run(*args, "--measure-tv", "--json").json
    assert cost == pytest.approx(figures["tv_cost"], abs=0.005) and cost > 0
    assert figures["settings"]["measure_tv"] is True


def test_a_drafter_that_cannot_follow_the_prompt_drafts_without_it(run, model, smaller) -> None:
    other = smaller(model / "tokenizer", words=("pine",), subjects=("pine",), slots=2)
    args = ["--method", "independent", "--drafter", other, "--json"]
    outcome = run("generate", PROMPT, "--model", model, *args)
    assert outcome.code == 0 and json.loads(outcome.out)["codes"] == 16
    assert outcome.err.count("\n") == 1 and "warning: the drafter drafts without the prompt" in outcome.err


def test_the_same_twice_is_the_same_file_and_another_seed_is_another_picture(run, model, empty_dir) -> None:
    names = {"one.png": 5, "two.png": 5, "new.png": 6}
    for name, seed in names.items():
        outcome = run("generate", PROMPT, "--model", model, "-n", 3, "--seed", seed, "-o", name)
        assert (outcome.code, outcome.err) == (0, "")  # no progress bar where stderr is no terminal
        assert outcome.out.startswith(f"{name}: ") and "codes per pass" in outcome.out
    one, two, _ = ((empty_dir / name).read_bytes() for name in names)
    assert one == two and {p.name for p in empty_dir.iterdir()} == names.keys()
    assert Image.open(empty_dir / "one.png").tobytes() != Image.open(empty_dir / "new.png").tobytes()
    assert Image.open(empty_dir / "one.png").size == (34, 34), "a grid of three"


def test_a_picture_of_other_settings_is_not_replaced(run, model, empty_dir: Path) -> None:
    def draw(*more: object) -> str:
        return run("generate", PROMPT, "--model", model, "--json", *more).json["file"]

    name = "out/a-photo-of-a-red-tulip-0"
    assert [draw(), draw("--cfg", 1), draw("--cfg", 4)] == [f"{name}.png", f"{name}-2.png", f"{name}-3.png"]
    before = contents(empty_dir / "out")
    assert [draw("--cfg", 1), draw()] == [f"{name}-2.png", f"{name}.png"]  # the same again is the same file
    assert contents(empty_dir / "out") == before
    assert draw("--cfg", 1, "--overwrite") == f"{name}.png"
    with Image.open(empty_dir / f"{name}.png") as image:
        assert json.loads(image.text["settings"])["cfg"] == 1 and "seconds" not in json.dumps(image.text)
        assert (image.text["prompt"], image.text["seed"]) == (PROMPT, "0")
    (empty_dir / f"{name}.png").write_bytes(b"a file of somebody else's")
    assert draw() == f"{name}-4.png"


def test_an_interrupt_keeps_finished_pictures(run, model, empty_dir: Path, monkeypatch) -> None:
    draw = ("generate", PROMPT, "--model", model, "--batch-size", 2, "-n", 9)
    assert run(*draw, "-o", "whole.png").code == 0
    with monkeypatch.context() as patch:
        finished, step, collect = [], Engine.step, Engine.collect

        def recorded(engine: Engine, slot: int) -> FinishedSample:
            finished.append(slot)
            return collect(engine, slot)

        def stop(engine: Engine) -> None:
            if len(finished) >= 4:
                raise KeyboardInterrupt
            step(engine)

        patch.setattr(Engine, "collect", recorded)
        patch.setattr(Engine, "step", stop)
        outcome = run(*draw)
    name, count = "out/a-photo-of-a-red-tulip-0.png", len(finished)
    assert (outcome.code, outcome.out) == (130, "") and 4 <= count < 9
    assert outcome.err == f"lanternpp: interrupted: {count} of 9 pictures were finished; they are in {name}\n"

    def tile(sheet: Image.Image, columns: int, place: int) -> bytes:
        left, top = 18 * (place % columns), 18 * (place // columns)
        return sheet.crop((left, top, left + 16, top + 16)).tobytes()

    with Image.open(empty_dir / name) as part, Image.open(empty_dir / "whole.png") as whole:
        seeds = [int(seed) for seed in part.text["seeds"].split()]
        assert len(seeds) == count == int(part.text["images"])
        for place, seed in enumerate(seeds):
            assert tile(part, squarest(count), place) == tile(whole, 3, seed)
    assert run(*draw).out.startswith(f"{name}: ")  # all pictures replace those of the interrupted run
    assert (empty_dir / name).read_bytes() == (empty_dir / "whole.png").read_bytes()


def test_a_cache_that_cannot_be_written_is_a_warning(run, model, empty_dir: Path, monkeypatch) -> None:
    (empty_dir / "file").write_text("mine")
    monkeypatch.setattr(engines, "cache_folder", lambda beside: empty_dir / "file" / "cache")
    outcome = run("generate", PROMPT, "--model", model, "-o", "x.png")
    assert outcome.code == 0 and outcome.err.count("\n") == 1 and "warning: " in outcome.err
    assert "file/cache" in outcome.err and (empty_dir / "x.png").exists()


def test_file_names_of_any_prompt(run, model, empty_dir: Path) -> None:
    assert run("generate", "../Tulip/ rouge: " + "é" * 300, "--model", model).code == 0
    (file,) = (empty_dir / "out").iterdir()
    assert file.name.startswith("tulip-rouge-é") and len(file.name) < 70
